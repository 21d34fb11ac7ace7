"""Passes: finds out when forward and backward passes of a model begin and end, and when gradients are complete.

Hooks report what the script does. What is done about it is the `Listener`'s, a session of either kind.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from gradlane.errors import JobError, UnsupportedError
from gradlane.live.session import guarded_params, interruptions, nested_passes
from gradlane.live.session.aliases import accumulator_of
from gradlane.live.session.hooks import (
    CallHook,
    Hook,
    ModuleHook,
    around_step,
    inside_a_backward_pass,
    is_called_inside_itself,
    is_compiled,
    tensors_in,
)
from gradlane.live.session.pending_gradient import PendingGradient
from gradlane.live.session.torch_patches import patch_for_good, take_as_a_tensor, unwatch_compiled_code, watch_compiled_code
from gradlane.live.session.tracked import Tracked
from gradlane.live.torch_versions import is_exporting, keeps_graph

UNSEEN_FORWARD = (
    "a backward pass began, and gradlane has seen no forward pass of the model since the last one (model.forward(inputs), "
    "another method of the model, a graph that is used twice): rank 0's buffers, such as BatchNorm's running statistics, were "
    "not sent before it, as DDP would; call the model itself, or pass broadcast_buffers=False"
)


PAST_WRAPPER = (
    "a backward pass began, and DistributedDataParallel was not called since the last one whose gradients were summed (a graph "
    "that is used twice, or a call of the module inside): its gradients are not summed, as under torch's class, so ranks may "
    "drift apart"
)


class Listener(interruptions.Interruptible, Protocol):
    """A session, as the passes of its model concern it. Called on the training thread, unless another is named."""

    @property
    def counting(self) -> bool:
        """Whether this iteration counts how often each hook fires in a backward pass; all gradients are sent at its end."""

    def before_forward(self, module: torch.nn.Module, compiling: bool, nested: bool) -> None:
        """The model is called; `compiling` from inside a compiled region, `nested` from inside of another call of it."""

    def after_forward(self, module: torch.nn.Module, nested: bool, output: Any) -> None:
        """The model has returned `output`."""

    def before_compiled_code(self, module: torch.nn.Module | None) -> None:
        """Compiled code is about to run: a method of `module`, or a function of the script, which may read anything."""

    def begin(self) -> None:
        """A backward pass begins whose gradients are summed."""

    def complete(self, tracked: Tracked) -> None:
        """The gradient of a parameter is complete."""

    def may_be_complete(self, tracked: Tracked) -> None:
        """The gradient of a parameter has come in an iteration that counts, maybe not for the last time."""

    def arrived_again(self, tracked: Tracked) -> None:
        """The gradient of a parameter has come more often than in the pass that was counted."""

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, compiling: bool) -> tuple[Any, Any] | None:
        """An optimizer steps, in compiled code or not. Returns the args and kwargs to step with instead, or None."""

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped."""

    def before_state_dict(self, *_: Any, **__: Any) -> None:
        """The model's state is saved or loaded."""

    def before_optimizer_state_dict(self, *_: Any, **__: Any) -> None:
        """An optimizer's state is saved."""

    def fail(self, text: str, kind: type[JobError] | type[UnsupportedError] = JobError) -> NoReturn:
        """Raise an error of `kind` with `text`, and tell the other ranks."""


class Passes:
    """The passes of one attached model.

    Args:
        model: gets the hooks.
        tracked: its trained parameters.
        optimizers: that have them.
        listener: is told.
        fills_in: a parameter that was frozen after its forward pass has a gradient of zeros; otherwise it counts as unused. So
            does one whose hook drops its gradient, but only under the drop-in.
        past_wrapper: the drop-in wraps the model: only its own calls count, as for torch's class. Called when a gradient is not
            summed because none came before. None: every call of the model counts, and so does a backward pass without one.

    Attributes:
        sync: whether backward passes sum gradients; `no_sync()` sets it, and so may whoever wraps the model.
        closed: the hooks are gone.
        was_evaluated: the last forward pass with gradients ran in evaluation mode.
        forward_was_seen: the model was called with gradients since the last sum.
        counts_calls: calls of the model count as forward passes. The drop-in sets it during its own.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tracked: Sequence[Tracked],
        optimizers: Sequence[torch.optim.Optimizer],
        listener: Listener,
        fills_in: bool = False,
        past_wrapper: Callable[[], None] | None = None,
    ) -> None:
        self.model, self._tracked, self._listener = model, tracked, listener
        self._complete = listener.complete
        self.sync, self.counts_calls = True, past_wrapper is None
        self._in_backward, self._fills_in, self._past_wrapper = False, fills_in, past_wrapper
        self.closed = self.was_evaluated = self.forward_was_seen = False
        # whether a forward pass since the last sum was outside of `no_sync()`; None: there was none
        self._forward_summed: bool | None = None
        self._compiled_parts: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._known = {id(each.param) for each in tracked}
        self._calls = 0  # of the model, each inside of the one before; one that has raised counts until the next begins
        self._handles: list[Any] = []
        patch_for_good()
        nested_passes.watch_passes()
        take_as_a_tensor(PendingGradient)
        hold = self._handles.append
        for each in tracked:
            each.accumulator = accumulator_of(each.param)
            hook = functools.partial(self._gradient_ready, each)
            handle = each.param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            each.hook = handle.id
            hold(handle)
        # swap_tensors refuses a tensor that has a weak reference; DDP has references in C++, which it refuses too
        self._refuses_swaps = [weakref.ref(each.param) for each in tracked]
        # the script's own see rank 0's buffers, as under torch's class
        first = model.register_forward_pre_hook(CallHook(self._call_begins, self._counts), prepend=True)
        self._pre_hook = first.id
        hold(first)
        hold(model.register_forward_hook(CallHook(self._call_ended, self._counts)))
        hold(model.register_state_dict_pre_hook(Hook(listener.before_state_dict)))  # type: ignore[no-untyped-call]
        # the public name of this is new in PyTorch 2.5
        hold(model._register_load_state_dict_pre_hook(Hook(listener.before_state_dict)))  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            hold(around_step(optimizer, listener.before_step, listener.after_step))
            hold(optimizer.register_state_dict_pre_hook(Hook(listener.before_optimizer_state_dict)))
        interruptions.add(listener)
        watch_compiled_code(listener)

    def hold(self, handle: Any) -> None:
        """Remove another hook with the others."""
        self._handles.append(handle)

    def close(self) -> None:
        """Remove all hooks."""
        self.closed = True
        interruptions.discard(self._listener)
        unwatch_compiled_code(self._listener)
        self._refuses_swaps.clear()
        for handle in self._handles:
            handle.remove()

    # -- wrappers -----------------------------------------------------------------------------------

    def refuse_wrappers(self, inside: bool) -> None:
        """Fail if DistributedDataParallel sums the model's gradients, too, since attach.

        Args:
            inside: look for one inside the model, not only around it.
        """
        around = DistributedDataParallel._active_ddp_module
        if isinstance(around, DistributedDataParallel) and any(module is self.model for module in around.modules()):
            self._fail_wrapped("DistributedDataParallel was put around the model")
        if inside:
            for name, module in self.model.named_modules():
                if isinstance(module, DistributedDataParallel):
                    self._fail_wrapped(f"DistributedDataParallel was put around {name}")

    def _fail_wrapped(self, what: str) -> NoReturn:
        self._listener.fail(
            f"{what} since attach, and sums gradients too: do not wrap what gradlane is attached to (a trainer that wraps the "
            "model by itself has to be told not to)",
            UnsupportedError,
        )

    def hook_compiled_parts(self) -> None:
        """Put a hook on each compiled part of the model that has none.

        A part may be compiled at any time before its first call, and its hook must be there then.
        """
        for module in self.model.modules():
            if module is not self.model and module not in self._compiled_parts and is_compiled(module):
                self._compiled_parts.add(module)
                self._handles.append(module.register_forward_pre_hook(ModuleHook(self.before_compiled)))

    # -- forward ------------------------------------------------------------------------------------

    def _counts(self) -> bool:
        """Whether a call counts that compiled code makes: no export, and no call past the drop-in's wrapper."""
        return self.counts_calls and not is_exporting()

    def _call_begins(self, module: torch.nn.Module, compiling: bool, _: Any) -> None:
        """Hook. Lightning calls `training_step` as the model's forward, and that calls the model: a call inside of a call."""
        nested = self._calls > 0 and is_called_inside_itself(module)
        self._calls = self._calls + 1 if nested else 1
        self._listener.before_forward(module, compiling, nested)

    def _call_ended(self, module: torch.nn.Module, _: bool, output: Any) -> None:
        """Hook."""
        nested = self._calls > 1 and is_called_inside_itself(module)
        self._calls = self._calls - 1 if nested else 0
        if not (nested or torch.is_grad_enabled()) and self.counts_calls:
            self.was_evaluated = False  # as under DDP, buffers are not due behind a call without gradients
        self._listener.after_forward(module, nested, output)

    def is_run_once_more(self) -> bool:
        """Whether a checkpoint calls the module past the drop-in's wrapper, inside of a backward pass."""
        return not self.counts_calls and inside_a_backward_pass()

    def come_first(self) -> None:
        """Put the session's pre-hook before those that the script has put before it since."""
        hooks: Any = self.model._forward_pre_hooks
        if self._pre_hook in hooks and next(iter(hooks)) != self._pre_hook:
            hooks.move_to_end(self._pre_hook, last=False)

    def forward_ended(self, module: torch.nn.Module, nested: bool, output: Any) -> bool:
        """Note the end of a forward pass with gradients.

        Returns:
            Whether buffers are due before the next forward pass, as under DDP. After a pass in
            evaluation mode, which may be an evaluation on this rank alone, they become due only if
            a backward pass follows that sums gradients.
        """
        if not self.counts_calls:
            return False
        self.forward_was_seen = True
        if not self.sync and not self._forward_summed:
            self._forward_summed = False
            return False
        self._hook_outputs(output)
        # inside of its forward pass torch's class sums no backward pass, unless its reducer is told to
        if not (nested and self._past_wrapper):
            self._forward_summed = True
        if nested:  # a backward pass may follow inside of the outer call
            return False
        self.was_evaluated = self.sync and not module.training
        return self.sync and module.training

    def before_compiled(self, module: torch.nn.Module, compiling: bool = True, _: Any = None) -> None:
        """Treat the call of a compiled part as the first use of all its parameters.

        The compiler's guards include a parameter's class; a part that met watched parameters would
        be compiled again and again.
        """
        for param in module.parameters():
            guarded_params.use(param)

    def _hook_outputs(self, output: Any) -> None:
        """Hook the model's output, so that a backward pass is noticed where it begins.

        A parameter's hook fires later, and readiness is timed from the beginning of the pass.
        """
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._output_gradient_ready)  # type: ignore[no-untyped-call]

    def sum_next_backward(self) -> None:
        """Let the next backward pass sum gradients, although its forward pass was under `no_sync()`."""
        self._forward_summed = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes inside accumulate gradients on this rank only."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    # -- backward -----------------------------------------------------------------------------------

    def _output_gradient_ready(self, _: torch.Tensor) -> None:
        if self._sums and not self._in_backward and self._will_accumulate():
            self._listener.begin()
            self._come_last()

    def _come_last(self) -> None:
        """Move the session's hooks behind those that the script has registered since: they see gradients as DDP sums them.

        Not while hooks of a parameter run, which run in the order that they had.
        """
        for tracked in self._tracked:
            hooks: Any = tracked.param._post_accumulate_grad_hooks
            if tracked.has_later_hooks and tracked.hook in hooks:
                hooks[tracked.hook] = hooks.pop(tracked.hook)

    @property
    def _sums(self) -> bool:
        """Whether the gradients of the running backward pass are summed over the ranks.

        As in DDP, they are if a forward pass since the last sum was outside of `no_sync()`. If the
        script calls parts of an attached model instead, the backward pass itself has to be outside.
        """
        if self._forward_summed is None:
            return self.sync and self._past_wrapper is None
        return self._forward_summed

    def _will_accumulate(self) -> bool:
        """Whether the pass will reach a parameter; `torch.autograd.grad` of inputs does not."""
        try:
            if any(torch._C._will_engine_execute_node(tracked.accumulator) for tracked in self._tracked):
                return True
            self.refuse_replaced(self._tracked)
        except RuntimeError:  # torch raises it if `torch.autograd.grad` got parameters as inputs
            pass
        if not (keeps_graph() or self._past_wrapper):
            self._forward_summed = None  # no other pass can go through that forward pass's graph
        return False

    def _gradient_ready(self, tracked: Tracked, param: torch.nn.Parameter) -> None:
        """Hook: autograd has accumulated into `.grad`, more than once under checkpoints."""
        if not self._in_backward:
            if not self._sums:
                tracked.accumulated = param.grad is not None
                if self._past_wrapper:
                    if self.sync and self._forward_summed is None:
                        self._past_wrapper()
                elif not (self._forward_summed is None or self.sync or keeps_graph()):
                    self._forward_summed = None  # as in `_will_accumulate`: the next pass may be of parts of the model
                return
            self._listener.begin()
        if param.grad is None:  # it was frozen after its forward pass, or a hook of its own has dropped the gradient
            if not (self._fills_in or (param.requires_grad and not self._past_wrapper)):
                return
            param.grad = torch.zeros_like(param)
        tracked.fired += 1
        if tracked.fired == tracked.expected:
            self._complete(tracked)
        elif self._listener.counting:
            self._listener.may_be_complete(tracked)
        elif tracked.fired > tracked.expected:
            self._listener.arrived_again(tracked)

    def backward_begins(self) -> None:
        """A backward pass begins: no hook has fired in it."""
        self._in_backward = True
        self.was_evaluated = False
        for tracked in self._tracked:
            tracked.fired = 0
            tracked.waiting = None

    def call_at_end(self, end: Callable[[], None]) -> None:
        """Call `end` at the end of the backward pass that has begun.

        Where the pass that runs now is inside of another that will reach a parameter, that is the end of the other.
        """

        def goes_on() -> None:
            reaches = False
            with contextlib.suppress(RuntimeError):  # as in `_will_accumulate`
                reaches = any(torch._C._will_engine_execute_node(tracked.accumulator) for tracked in self._tracked)
            if reaches:
                self.call_at_end(end)
            else:
                end()

        def ended() -> None:
            if nested_passes.is_inner():
                nested_passes.after_inner(goes_on)
            else:
                end()

        torch.autograd.Variable._execution_engine.queue_callback(ended)

    def backward_ended(self) -> None:
        """The backward pass is over."""
        self._in_backward = False
        self._forward_summed = None
        self.forward_was_seen = False
        for tracked in self._tracked:
            tracked.accumulated = False

    def count(self) -> None:
        """Each hook has fired as often as it will in later passes, if this iteration counts."""
        if self._listener.counting:
            for tracked in self._tracked:
                tracked.expected = max(1, tracked.fired)

    def refuse_replaced(self, several: Iterable[Tracked]) -> None:
        """Fail if the model trains another tensor than one of `several`."""
        for tracked in several:
            if self._is_replaced(tracked):
                self._listener.fail(
                    f"{tracked.name} was replaced since attach (load_state_dict(assign=True), swap_tensors, another "
                    "Parameter?), and neither its gradient nor the optimizer reaches what is there now: close() the session "
                    "before such a change, and attach again with an optimizer of the new parameters",
                    UnsupportedError,
                )

    def _is_replaced(self, tracked: Tracked) -> bool:
        """Whether the model no longer trains a parameter with this session's hook.

        Another tensor may be in its place, or its contents, hooks included, may have been swapped.
        """
        hooks = getattr(tracked.param, "_post_accumulate_grad_hooks", None) or {}
        if tracked.hook not in hooks:
            return True
        owner, _, short = tracked.name.rpartition(".")
        try:
            now = self.model.get_submodule(owner)._parameters.get(short)
        except AttributeError:
            return False
        # a tensor that the session knows is there because weights were tied
        return now is not None and now.requires_grad and id(now) not in self._known
