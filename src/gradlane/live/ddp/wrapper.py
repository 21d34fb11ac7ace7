"""DistributedDataParallel: torch's, whose gradients gradlane schedules once it has seen an optimizer.

Until the first optimizer steps, and wherever gradlane cannot attach, this is torch's own class with
its own behaviour. The forward pass after the first step attaches, on all ranks at the same place.
"""

# torch's class has no types
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import logging
import os
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel import distributed

from gradlane.errors import JobError, UnsupportedError
from gradlane.live.ddp.optimizers import tell_of_steps
from gradlane.live.ddp.outputs import through_one_node
from gradlane.live.ddp.reducer import Reducer
from gradlane.live.session.console import ONCE, use_console
from gradlane.live.session.frozen import not_summed
from gradlane.live.session.idle import IdleSession
from gradlane.live.session.ignored import ignored_beside, ignored_in, summed_parameters
from gradlane.live.session.session import Session
from gradlane.live.startup.attach import Wrapped, attach_from
from gradlane.live.startup.launched import launched
from gradlane.live.startup.lifecycle import session_of, sharing_with
from gradlane.live.startup.options import AttachOptions

log = logging.getLogger("gradlane")

_of_wrappers: weakref.WeakSet[Session] = weakref.WeakSet()
_wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_abandoned: list[Session] = []  # their wrappers are gone; any thread may have dropped those


def _abandon(session: Session) -> None:
    """The wrapper of `session` is gone: torch's would sum no more either. Any thread may call this."""
    session.leave_alone()
    _abandoned.append(session)


_POST_FORWARD = distributed._BufferCommHookLocation.POST_FORWARD
_OWN = ("_optimizers", "_session", "_kept_by_torch", "_syncs", "_evaluations", "_reduced", "_frozen", "_known", "_process")
"""Attributes that no copy gets."""
_MANY_EVALUATIONS = 20
"""Forward passes in evaluation mode, with gradients and after a step, after which a script is taken to train so."""


def _close_abandoned() -> None:
    while _abandoned:
        _abandoned.pop().close()


def _take_back(module: nn.Module) -> None:
    """Close the session of an earlier wrapper of `module`, and those whose wrappers are gone.

    Raises:
        UnsupportedError: the script itself is attached to `module`, or to another model that shares a parameter with it.
    """
    _close_abandoned()
    session = session_of(module)
    summed = summed_parameters(module, ignored_in(module))
    shared = sharing_with(module, (param for _, param in summed if param.requires_grad))
    if shared is not None and shared[0] not in _of_wrappers:
        raise UnsupportedError(
            f"the model shares {shared[1]} with a {type(shared[0].model).__name__} that gradlane is attached to, which sums "
            "its gradient: put both models into one module and attach to that, or close() that session first"
        )
    if session is not None and session not in _of_wrappers:
        raise UnsupportedError(
            "gradlane is attached to this model, which sums its gradients: do not wrap it in DistributedDataParallel, too"
        )
    if session is not None:
        session.close()


def _differ(params: Iterable[nn.Parameter], group: Any) -> bool:
    """Whether ranks have different values of `params` (collective)."""
    own = hashlib.sha256()
    for param in params:
        own.update(param.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    digests: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(digests, own.digest(), group)
    return len(set(digests)) > 1


def _parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


# hooks that only say how gradients travel, and the dtype in which they do; None as without a hook
_TRAVEL_AS: dict[Any, str | None] = {
    default_hooks.allreduce_hook: None,
    default_hooks.fp16_compress_hook: "float16",
    default_hooks.bf16_compress_hook: "bfloat16",
    BuiltinCommHookType.ALLREDUCE: None,
    BuiltinCommHookType.FP16_COMPRESS: "float16",
}
# arguments with which others sum gradients, or see them in another dtype
_FOR_OTHERS = ("mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce")


@dataclasses.dataclass
class _Split:
    """What the compiler asks of the wrapper in whose forward pass it compiles: it splits graphs where DDP's buckets end.

    A model whose gradients gradlane sums is split there too: fused otherwise, it would round otherwise.
    """

    bucket_bytes_cap: int


@contextlib.contextmanager
@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _compiled_for(wrapper: Any) -> Iterator[None]:
    """What is compiled inside is part of the forward pass of `wrapper`."""
    # the compiler asks torch's class, or what has its place, whichever was there when the compiler was imported
    classes: set[Any] = {TorchDDP, distributed.DistributedDataParallel}
    before = [(each, each._active_ddp_module) for each in classes]
    for each in classes:
        each._active_ddp_module = wrapper
    try:
        yield
    finally:
        for each, active in before:
            each._active_ddp_module = active


class DistributedDataParallel(TorchDDP):
    """In place of `torch.nn.parallel.DistributedDataParallel`, with the same arguments and methods.

    The optimizers are found by themselves, since they hold parameters of the module. The first training
    forward pass after their first `step()` calls `gradlane.attach` for them. An optimizer
    that steps for the first time later is taken in before the next forward pass, and so are
    parameters that were frozen then. Torch sums the gradients before, and also afterwards where gradlane
    refuses the model; then one line says why. A parameter that is frozen when the model is wrapped and
    trained later, or put into the model later, is summed by neither, since torch's class never does; one line says so.

    As for torch's class, only a backward pass after a call of this object is summed: not a second one through the same
    graph, nor one after a call of the module inside. One line says so.

    `bucket_cap_mb`, `gradient_as_bucket_view`, `static_graph` and `find_unused_parameters` matter
    for as long as torch sums: gradlane's plan decides what travels together, and any parameter may
    be unused. A model stays torch's under `join()` or `torch.distributed.algorithms.Join`, with a communication
    hook, and with `mixed_precision` or `delay_all_reduce_named_params`: they let others sum gradients. It also does with
    `require_manual_backward_finalization`: the script then ends its backward passes. A hook that
    compresses to halves is what `wire_dtype` does, and where that names its dtype gradlane sums.

    Args:
        module: on one device.
        args: torch's.
        options: keywords for `gradlane.attach`; those of `gradlane launch` win over them.
        kwargs: torch's.
    """

    default_options: ClassVar[Mapping[str, Any]] = {}
    """Of models that are wrapped from now on, where `options` does not say otherwise."""
    made: ClassVar[int] = 0
    """How many models this process has wrapped."""

    _optimizers: list[torch.optim.Optimizer]
    _session: Session | None
    _kept_by_torch: str  # why, or ""
    _syncs: bool
    _evaluations: int
    _reduced: tuple[Any, ...]  # what torch's reducer was made of when the model was wrapped, parameters first
    _process: int  # that wrapped the model
    _known: list[nn.Parameter]  # of the model when it was wrapped
    _frozen: list[nn.Parameter]  # of those, which required no gradients
    _tells_of_frozen: bool
    _tells_of_absent: bool
    _dtypes: dict[nn.Parameter, torch.dtype]  # when the model was wrapped; empty once a session has summed
    reducer: Any
    logger: Any
    module: nn.Module

    def __init__(self, module: nn.Module, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        _take_back(module)
        DistributedDataParallel.made += 1
        use_console()
        self._begin_as_torchs()
        super().__init__(module, *args, **kwargs)
        self._note_parameters()
        self._share_with_others()
        for name in _FOR_OTHERS:
            if kwargs.get(name) is not None:
                self._keep_torchs(f"with {name} others sum gradients, or see them in another dtype")
        if getattr(self, "_use_python_reducer", False):
            self._keep_torchs("torch._dynamo.config.optimize_ddp is 'python_reducer': compiled autograd traces the sums")
        self._options = {**self.default_options, **(options or {})}
        tell_of_steps(self)

    def _begin_as_torchs(self) -> None:
        # torch's constructor sets what is a property here; Module.__setattr__ is not ready before it
        self.__dict__.update(
            _optimizers=[], _session=None, _kept_by_torch="", _syncs=True, _evaluations=0, _broadcasts=True,
            _reduced=((),), _known=[], _frozen=[], _tells_of_frozen=True, _tells_of_absent=True, _dtypes={},
            _process=os.getpid(),
        )  # fmt: skip

    def _note_parameters(self) -> None:
        self._known = list(self.module.parameters())
        self._frozen = [param for param in self._known if not param.requires_grad]
        self._dtypes = {param: param.dtype for param in self._known}

    @property
    def session(self) -> Session | None:
        """The session that schedules this module's gradients; None while torch sums them."""
        return self._session

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward passes sum gradients; `no_sync()` sets it, and so do trainers."""
        return self._syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, syncs: bool) -> None:
        self._syncs = syncs
        if self._session is not None:
            self._session.sync = syncs

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether the script calls `finalize_backward()`, which PyTorch has from 2.15 on; such a model stays torch's."""
        finalizes: bool = TorchDDP.require_manual_backward_finalization.__get__(self)  # type: ignore[attr-defined]
        return finalizes

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            self._keep_torchs("with require_manual_backward_finalization the script ends its backward passes")
        TorchDDP.require_manual_backward_finalization.__set__(self, required)  # type: ignore[attr-defined]

    # -- from torch to gradlane --------------------------------------------------------------------

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before the first step of each optimizer of this process."""
        steps = _parameters_of(optimizer)
        if any(optimizer is one for one in self._optimizers) or steps.isdisjoint(map(id, self.module.parameters())):
            return
        if self._session is not None:
            self._session.flush()  # which does not know it: a session for it begins with the next forward pass
        # one that held the same parameters before is of an earlier phase of the script
        self._optimizers = [*(one for one in self._optimizers if steps.isdisjoint(_parameters_of(one))), optimizer]
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            self._keep_torchs("ZeroRedundancyOptimizer updates a share of the parameters on each rank")

    @property
    def _is_due(self) -> bool:
        # a trainer may put the module alone back into training mode after a validation, as Lightning does
        if not self._optimizers or self._kept_by_torch or not self.module.training or not torch.is_grad_enabled():
            return False
        session = self._session
        if session is None or list(session.optimizers) != self._optimizers or session.trains_more is not None:
            return True
        return session.has_other_buffers

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_evaluation(self) -> None:
        """A forward pass in evaluation mode attaches nothing: one rank alone may evaluate. A script that trains so is told."""
        self._evaluations += 1
        if self._evaluations == _MANY_EVALUATIONS:
            self._tell_torch_sums("the model is in evaluation mode; gradlane waits for a forward pass in training mode")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attach(self) -> None:
        if self._session is not None and not set(self._optimizers) <= set(self._session.optimizers):
            self._tell("a new optimizer steps the model: gradlane attaches anew, and measures steps anew")
        self._detach()
        self._share_with_others()  # a part that both train only now
        if self._kept_by_torch:
            return
        if self._join_config.enable:
            self._keep_torchs("join() lets ranks run out of inputs one by one, which torch's class is made for")
            return
        if self._waits_for_parameters():
            return
        for name, param in self.module.named_parameters():
            before = self._dtypes.get(param, param.dtype)
            if before is not param.dtype:
                self._keep_torchs(
                    f"{name} was {before} when the model was wrapped and is {param.dtype} now. That takes torch's hooks off, "
                    "so ranks drift apart; wrap the model after that"
                )
                return
        if self.static_graph and self._dtypes and _differ([param for _, param in self._summed], self.process_group):
            self._keep_torchs(
                "ranks have different parameters after their first step, since static_graph=True has taken another backward "
                "pass for the first (torch.autograd.grad, say), so ranks drift apart"
            )
            return
        self._tell_of_what_was_added()
        self._broadcasts = bool(self.broadcast_buffers)
        options = {"broadcast_buffers": self._broadcasts, **self._options}
        policy = options.pop("policy", None)
        wrapped = Wrapped(self.require_forward_param_sync, self._left_out, self.find_unused_parameters)
        self._own_gradients()
        try:
            session = attach_from(self.module, self._optimizers, policy, self.process_group, options, wrapped)
        except UnsupportedError as error:
            self._keep_torchs(str(error))
            return
        if isinstance(session, IdleSession):
            self._kept_by_torch = "one rank trains alone"  # as everybody knows
            return
        session.sync = self._syncs
        self._session, self._dtypes = session, {}
        _of_wrappers.add(session)
        weakref.finalize(self, _abandon, session).atexit = False
        # a reducer keeps buckets, which take as much memory as the gradients, and refers to parameters
        self._remove_autograd_hooks()
        self.reducer, self.logger = Reducer(session), None

    def _waits_for_parameters(self) -> bool:
        """Whether the model lacks a parameter in this pass that torch sums and an optimizer updates: a session would leave it
        out for good. One line says so.
        """
        stepped = set().union(*map(_parameters_of, self._optimizers))
        absent = stepped.intersection(map(id, self._reduced[0])).difference(map(id, self.module.parameters()))
        if absent and self._tells_of_absent:
            self._tells_of_absent = False
            self._tell_torch_sums(
                "a parameter that was wrapped is not in the model in this pass (torch.func.functional_call, or an exchanged "
                "layer); gradlane waits for a forward pass with all of them"
            )
        return bool(absent)

    @property
    def _broadcasts_otherwise(self) -> bool:
        """Whether `broadcast_buffers` has changed since attach. torch's class reads it in each forward pass, a session once.

        Not in evaluation mode with gradients, where one rank may be alone under torch's class too.
        """
        if self._session is None or bool(self.broadcast_buffers) == self._broadcasts or not self.modules_buffers:
            return False
        return self.module.training or not torch.is_grad_enabled()

    def _share_with_others(self) -> None:
        """Let torch sum for all wrappers that share a trained parameter with this one: each sums its gradient."""
        if self._sharing():
            gc.collect()  # wrappers that the script has dropped must count on no rank
            _close_abandoned()
        for other, name in self._sharing():
            for wrapper in (other, self):
                wrapper._keep_torchs(f"two wrapped models share {name}")
        _wrappers.add(self)

    def _sharing(self) -> list[tuple[DistributedDataParallel, str]]:
        """Wrappers of other models that share a trained parameter with this one, and its name here."""
        mine = {id(param): name for name, param in self._summed}
        found = []
        for other in list(_wrappers):
            shared = [mine[id(param)] for _, param in other._summed if id(param) in mine]
            if shared and other.module is not self.module:
                found.append((other, shared[0]))
        return found

    @property
    def _left_out(self) -> frozenset[str]:
        """Names of the tensors that torch's class leaves to each rank."""
        return ignored_beside(self.module, self._reduced[0], self.parameters_to_ignore)

    @property
    def _summed(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, param) for name, param in summed_parameters(self.module, self._left_out) if param.requires_grad]

    def _own_gradients(self) -> None:
        """Take gradients out of torch's buckets, which the session would take for the script's."""
        if self.gradient_as_bucket_view:
            for param in self.module.parameters():
                if param.grad is not None:
                    param.grad = param.grad.clone()

    def _keep_torchs(self, reason: str) -> None:
        """From now on torch sums the gradients. The first reason stands."""
        if self._kept_by_torch:
            return
        self._detach()
        self._kept_by_torch = reason
        self._tell_torch_sums(reason)

    def _tell_torch_sums(self, reason: str) -> None:
        self._tell(f"torch's DistributedDataParallel sums the gradients: {reason}")

    def _tell(self, text: str) -> None:
        # a worker of a DataLoader may be a fork with a copy of this wrapper, which is no rank
        if torch.distributed.get_rank(self.process_group) == 0 and os.getpid() == self._process:
            log.warning("gradlane: %s", text, extra=ONCE)

    def _detach(self) -> None:
        """Give the module back to torch, if it is scheduled."""
        session = self._session
        if session is None:
            return
        if session.failed:
            raise JobError("the job has failed; torch's DistributedDataParallel cannot go on with what was partly summed")
        session.close()
        self._session = None
        with self._requiring_gradients():
            super()._ddp_init_helper(*self._reduced)
        if self.static_graph:
            self.reducer._set_static_graph()
            self.logger._set_static_graph()

    @contextlib.contextmanager
    def _requiring_gradients(self) -> Iterator[None]:
        """All parameters of torch's reducer require gradients, which it asks of them when it is made."""
        frozen = [param for param in self._reduced[0] if not param.requires_grad]
        try:
            for param in frozen:
                param.requires_grad_(True)
            yield
        finally:
            for param in frozen:
                param.requires_grad_(False)

    def _ddp_init_helper(self, parameters: list[nn.Parameter], *args: Any) -> None:
        """As torch's, which makes the reducer: it sums the gradients of `parameters`, and never others."""
        self._reduced = (parameters, *args)
        super()._ddp_init_helper(parameters, *args)

    # -- what scripts call -------------------------------------------------------------------------

    # compiled around the wrapper, only the module's own code is compiled, as with torch's class
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module, as torch's class does."""
        if self._is_due:
            self._attach()
        elif self._session is not None and self._session.closed:
            self._keep_torchs("the session was closed")
        elif self._broadcasts_otherwise:
            self._keep_torchs(
                f"broadcast_buffers was {self._broadcasts} at the first step and is {not self._broadcasts} now; set it before "
                "the first step"
            )
        if self._session is None:
            if self._optimizers and not self._kept_by_torch and torch.is_grad_enabled():
                self._note_evaluation()
            return super().forward(*inputs, **kwargs)
        if self.device_ids:
            moved, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved[0], moved_kwargs[0]
        session = self._session
        self._tell_of_what_is_trained_too()
        session.counts_calls = True
        try:
            with _compiled_for(_Split(self.bucket_bytes_cap)):
                output = self.module(*inputs, **kwargs)
        finally:
            session.counts_calls = False
        self.require_forward_param_sync = torch.is_grad_enabled() and self._syncs
        if self.find_unused_parameters and not self.static_graph:
            return through_one_node(output, clones=getattr(self, "_ddp_sink_clone", True))
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _tell_of_what_is_trained_too(self) -> None:
        if self._tells_of_frozen and any(param.requires_grad for param in self._frozen):
            self._tells_of_frozen = False
            trained = {id(param) for param in self._frozen if param.requires_grad}
            name = next((name for name, param in self.module.named_parameters() if id(param) in trained), None)
            if name is not None:
                self._tell_not_summed(f"{name} was frozen when the model was wrapped and is trained now")

    def _tell_of_what_was_added(self) -> None:
        known = set(map(id, self._known))
        for name, param in self.module.named_parameters():
            if param.requires_grad and id(param) not in known:
                self._tell_not_summed(f"{name} was put into the model after it was wrapped")
                return

    def _tell_not_summed(self, why: str) -> None:
        self._tell(not_summed(why, "wrap the model again"))

    def _inside_ddp_forward(self) -> Any:
        """As torch's, which tells the compiler by way of a class that `replace_ddp` may have replaced."""
        return _compiled_for(self)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes inside accumulate gradients on this rank only."""
        with super().no_sync():
            yield

    def join_hook(self, **kwargs: Any) -> Any:
        """As torch's, which needs its own sums."""
        self._detach()
        return super().join_hook(**kwargs)

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """As torch's, which sums for this model from now on, unless `wire_dtype` has gradlane do what the hook does."""
        if self._goes_to_torch(hook, "a communication hook"):
            super().register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """As `register_comm_hook`."""
        if self._goes_to_torch(comm_hook_type, "a built-in communication hook"):
            super()._register_builtin_comm_hook(comm_hook_type)

    def _goes_to_torch(self, hook: Any, what: str) -> bool:
        """Give the model to torch because of a hook, if gradlane does not do what that does; whether torch has a reducer."""
        unknown = object()
        options = {name: value for name, value in self._options.items() if name != "policy"}
        asked = AttachOptions.of(None, options, launched()).carrier.wire_dtype
        dtype = _TRAVEL_AS.get(hook, unknown) if isinstance(hook, Hashable) else unknown
        if dtype is unknown or dtype != asked:
            halves = f"; gradlane sums with --wire-dtype {dtype}" if isinstance(dtype, str) else ""
            self._keep_torchs(f"{what} takes its buckets{halves}")
        return self._session is None

    def _register_buffer_comm_hook(self, state: object, hook: Any, comm_hook_location: Any = _POST_FORWARD) -> None:
        """As torch's, which sums for this model from now on: a session sends rank 0's buffers."""
        self._keep_torchs("a hook makes its buffers equal")
        super()._register_buffer_comm_hook(state, hook, comm_hook_location)

    def _update_process_group(self, new_process_group: Any) -> None:
        """As torch's, which sums for this model from now on: a session keeps its ranks."""
        self._keep_torchs("it is given another process group")
        super()._update_process_group(new_process_group)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """As torch's; empty while gradlane sums. Lightning asks for it when it has trained."""
        data: dict[str, Any] = super()._get_ddp_logging_data() if self._session is None else {}
        return data

    # -- copies ------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which torch sums until an optimizer of its own has stepped."""
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name not in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's, for a copy."""
        self._begin_as_torchs()
        super().__setstate__(state)
        self._note_parameters()
        tell_of_steps(self)
