"""SessionBase: what both kinds of session share: hooks, `no_sync()` and the `with` block.

Hooks report the passes of the model. This class finds out when the gradient of a parameter is
complete; the session decides what is done with it.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from gradlane.errors import JobError, UnsupportedError
from gradlane.live.session import interruptions
from gradlane.live.session.aliases import accumulator_of
from gradlane.live.session.guards import PendingGradient
from gradlane.live.session.hooks import Hook, ModuleHook, around_step, is_compiled, tensors_in
from gradlane.live.session.torch_patches import before_compiled_code, forget, guard_torchscript, take_as_a_tensor
from gradlane.live.torch_versions import keeps_graph

if TYPE_CHECKING:
    from typing_extensions import Self  # of typing from Python 3.11 on

UNSEEN_FORWARD = (
    "a backward pass began, and gradlane has seen no forward pass of the model since the last one (model.forward(inputs), "
    "another method of the model, a graph that is used twice): rank 0's buffers, such as BatchNorm's running statistics, were "
    "not sent before it, as DDP would; call the model itself, or pass broadcast_buffers=False"
)


class SessionBase(ABC):
    """A session that is attached to one model. Everything here runs on the training thread.

    Args:
        model: gets the hooks, once `_attach_hooks` is called.

    Attributes:
        sync: whether backward passes sum gradients; `no_sync()` sets it, and so may whoever wraps the
            model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.sync = True
        self._in_backward = False
        self._closed = False
        self._handles: list[Any] = []
        self._compiled_parts: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._tensor_of: dict[int, int] = {}  # by id of parameter
        # by tensor: how often its hook has fired in this backward pass
        self._fired: list[int] = []
        # whether the last forward pass with gradients ran in evaluation mode
        self._was_evaluated = False
        # whether a forward pass since the last sum was outside of `no_sync()`; None: there was none
        self._forward_summed: bool | None = None
        # by id of parameter: autograd's nodes; `aliases.py` needs them to be kept
        self._accumulators: dict[int, Any] = {}
        self._hook_of: dict[int, int] = {}  # by id of parameter: the key of its hook
        # ids of parameters that got a gradient under `no_sync()` since the last sum
        self._accumulated: set[int] = set()
        # by tensor: how often its hook fires in one pass, more than once under checkpoints; 0 until
        # that has been counted
        self._expected: list[int] = []

    # -- what each kind of session defines ---------------------------------------------------------

    @property
    @abstractmethod
    def _counting(self) -> bool:
        """Whether this iteration counts how often each hook fires in a backward pass."""

    @abstractmethod
    def _name_of(self, tensor: int) -> str: ...

    @abstractmethod
    def _before_forward(self, module: torch.nn.Module, compiling: bool, _: Any) -> None: ...

    @abstractmethod
    def _before_compiled(self, module: torch.nn.Module, compiling: bool, _: Any) -> None:
        """A compiled part of the model is about to run, and reads parameters past every guard."""

    @abstractmethod
    def _before_compiled_code(self, module: torch.nn.Module | None) -> None:
        """Compiled code is about to run: a method of `module`, or a function of the script, which may read anything."""

    @abstractmethod
    def _after_forward(self, module: torch.nn.Module, compiling: bool, output: Any) -> None: ...

    @abstractmethod
    def _begin(self) -> None:
        """A backward pass begins."""

    @abstractmethod
    def _launch(self, tensor: int) -> None:
        """The gradient of a tensor is complete."""

    @abstractmethod
    def _refuse_replaced(self) -> None:
        """Fail if the model trains other tensors than those that were there at attach."""

    @abstractmethod
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, compiling: bool) -> tuple[Any, Any] | None:
        """An optimizer steps, in compiled code or not. Returns the args and kwargs to step with instead, or None."""

    @abstractmethod
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None: ...

    @abstractmethod
    def _fail(self, text: str, kind: type[JobError] | type[UnsupportedError] = JobError) -> NoReturn:
        """Raise an error of `kind` with `text`, and tell the other ranks."""

    @property
    @abstractmethod
    def failed(self) -> bool: ...

    @abstractmethod
    def flush(self) -> None: ...

    @abstractmethod
    def _settle(self) -> None:
        """Bring parameters and optimizer state to what DDP would have; leave gradients alone."""

    @abstractmethod
    def abort(self, error: BaseException) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    # -- wrappers ----------------------------------------------------------------------------------

    def _refuse_wrappers(self, inside: bool) -> None:
        """Fail if DistributedDataParallel sums the model's gradients, too, since attach.

        Args:
            inside: look for one inside the model, not only around it.
        """
        around = DistributedDataParallel._active_ddp_module
        if around is not None and any(module is self.model for module in around.modules()):
            self._fail_wrapped("DistributedDataParallel was put around the model")
        if inside:
            for name, module in self.model.named_modules():
                if isinstance(module, DistributedDataParallel):
                    self._fail_wrapped(f"DistributedDataParallel was put around {name}")

    def _fail_wrapped(self, what: str) -> NoReturn:
        self._fail(
            f"{what} since attach, and sums gradients too: do not wrap what gradlane is attached to (a trainer that wraps the "
            "model by itself has to be told not to)",
            UnsupportedError,
        )

    # -- hooks -------------------------------------------------------------------------------------

    def _attach_hooks(self, params: Iterable[torch.nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        guard_torchscript()
        take_as_a_tensor(PendingGradient)
        params = list(params)
        self._accumulators = {id(param): accumulator_of(param) for param in params}
        for param in params:
            handle = param.register_post_accumulate_grad_hook(self._gradient_ready)  # type: ignore[no-untyped-call]
            self._hook_of[id(param)] = handle.id
            self._handles.append(handle)
        self._handles.append(self.model.register_forward_pre_hook(ModuleHook(self._before_forward)))
        self._handles.append(self.model.register_forward_hook(ModuleHook(self._after_forward)))
        self._handles.append(self.model.register_state_dict_pre_hook(Hook(self._before_state_dict)))  # type: ignore[no-untyped-call]
        # the public name of this is new in PyTorch 2.5
        self._handles.append(self.model._register_load_state_dict_pre_hook(Hook(self._before_state_dict)))  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            self._handles.append(around_step(optimizer, self._before_step, self._after_step))
            self._handles.append(optimizer.register_state_dict_pre_hook(Hook(self._before_optimizer_state_dict)))
        interruptions.add(self)
        before_compiled_code(self)

    def _hook_compiled_parts(self) -> None:
        """Put a hook on each compiled part of the model that has none.

        A part may be compiled at any time before its first call, and its hook must be there then.
        """
        for module in self.model.modules():
            if module is not self.model and module not in self._compiled_parts and is_compiled(module):
                self._compiled_parts.add(module)
                self._handles.append(module.register_forward_pre_hook(ModuleHook(self._before_compiled)))

    def _forward_ended(self, module: torch.nn.Module, output: Any) -> bool:
        """Note the end of a forward pass with gradients.

        Returns:
            Whether buffers are due before the next forward pass, as under DDP. After a pass in
            evaluation mode, which may be an evaluation on this rank alone, they become due only if
            a backward pass follows that sums gradients.
        """
        if not self.sync and not self._forward_summed:
            self._forward_summed = False
            return False
        self._hook_outputs(output)
        self._was_evaluated = self.sync and not module.training
        return self.sync and module.training

    def _hook_outputs(self, output: Any) -> None:
        """Hook the model's output, so that a backward pass is noticed where it begins.

        A parameter's hook may be too late: inside a reentrant checkpoint it fires in a nested pass,
        which ends before the whole backward pass does.
        """
        self._forward_summed = True
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._output_gradient_ready)  # type: ignore[no-untyped-call]

    def _detach_hooks(self) -> None:
        self._closed = True
        interruptions.discard(self)
        forget(self)
        for handle in self._handles:
            handle.remove()

    def _before_state_dict(self, *_: Any, **__: Any) -> None:
        self._settle()

    def _before_optimizer_state_dict(self, *_: Any, **__: Any) -> None:
        self._settle()

    # -- forks and signals, see `interruptions.py` --------------------------------------------------

    def _is_busy_here(self) -> bool:
        """Whether the calling thread is in the middle of a change of what other threads of the session share."""
        return False

    def _before_fork(self) -> None:
        """Make all deferred updates, unless the job has failed."""
        if not self.failed:
            self._settle()

    def _in_child(self) -> None:
        """Detach from the model, in a child process that has no other thread."""
        self.sync = False
        self._detach_hooks()

    # -- backward ----------------------------------------------------------------------------------

    def _output_gradient_ready(self, _: torch.Tensor) -> None:
        if self._sums and not self._in_backward and self._will_accumulate():
            self._begin()

    @property
    def _sums(self) -> bool:
        """Whether the gradients of the running backward pass are summed over the ranks.

        As in DDP, they are if a forward pass since the last sum was outside of `no_sync()`. If the
        script calls parts of the model instead, the backward pass itself has to be outside.
        """
        return self.sync if self._forward_summed is None else self._forward_summed

    def _will_accumulate(self) -> bool:
        """Whether the pass will reach a parameter; `torch.autograd.grad` of inputs does not."""
        try:
            if any(torch._C._will_engine_execute_node(node) for node in self._accumulators.values()):
                return True
            self._refuse_replaced()
        except RuntimeError:  # torch raises it if `torch.autograd.grad` got parameters as inputs
            pass
        if not keeps_graph():
            self._forward_summed = None  # no other pass can go through that forward pass's graph
        return False

    def _gradient_ready(self, param: torch.nn.Parameter) -> None:
        """Hook: autograd has accumulated into `param.grad`, more than once under checkpoints."""
        if not self._in_backward:
            if not self._sums:
                self._accumulated.add(id(param))
                return
            self._begin()
        tensor = self._tensor_of[id(param)]
        fired = self._fired[tensor] = self._fired[tensor] + 1
        expected = self._expected[tensor]
        if fired == expected:
            self._launch(tensor)
        # while hooks are counted, all gradients are sent at the end of the pass
        elif fired > expected and not self._counting:
            self._fail(
                f"the gradient of {self._name_of(tensor)} arrived {fired} times in one backward pass, expected {expected}; use "
                "checkpoint(use_reentrant=False), and one backward pass a step"
            )

    def _is_replaced(self, param: torch.nn.Parameter, name: str) -> bool:
        """Whether the model no longer trains `param` with this session's hook.

        Another tensor may be in its place, or its contents, hooks included, may have been swapped.
        """
        hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
        if self._hook_of[id(param)] not in hooks:
            return True
        owner, _, short = name.rpartition(".")
        try:
            now = self.model.get_submodule(owner)._parameters.get(short)
        except AttributeError:
            return False
        # a tensor that the session knows is there because weights were tied
        return now is not None and now.requires_grad and id(now) not in self._tensor_of

    # -- what a training script calls --------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the session has been detached from the model."""
        return self._closed

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes inside accumulate gradients on this rank only, as DDP's `no_sync`.

        Their forward passes belong inside too.
        """
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def sum_next_backward(self) -> None:
        """Let the next backward pass sum gradients, although its forward pass was under `no_sync()`."""
        self._forward_summed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not self._closed:
            self.abort(error)
        self.close()
