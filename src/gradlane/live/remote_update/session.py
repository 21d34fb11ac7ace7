"""ServedSession: one rank of a job whose parameters are on servers. Everything here runs on the
training thread.

One iteration:

    forward     the first use of a parameter waits until its new value has arrived
                (`live/session/guards.py`)
    backward    `_begin` sends the servers optimizer options that have changed, `_gradient_ready`
                each gradient, `_end` which parameters had none
    step        copies the new values that have arrived and guards the other parameters; gradients
                are hidden from the optimizer, so that it updates nothing

Gradients have been sent when `backward()` returns. So a script that changes a gradient or an
optimizer option between `backward()` and `step()` is too late, which raises an error. So does a
script that writes to a parameter, since the servers' value would not change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from gradlane.errors import JobError, PeerFailed, UnsupportedError
from gradlane.live.comm.turn import given_up, in_turn, turn
from gradlane.live.remote_update.broadcasts import Broadcasts
from gradlane.live.remote_update.parameter_groups import ParameterGroups
from gradlane.live.remote_update.states import fetched_states
from gradlane.live.remote_update.values import SentGradient, Values
from gradlane.live.session import guards, outdated
from gradlane.live.session.base import UNSEEN_FORWARD, SessionBase
from gradlane.live.session.closures import run_first
from gradlane.live.session.hooks import Hook, inside_a_backward_pass, is_compiled, parameters_of_scripts

log = logging.getLogger("gradlane")


class ServedSession(SessionBase):
    """Made by `gradlane.attach_to_servers`; `close()`, or the end of a `with` block, detaches it.

    A training script may use `no_sync()`, `flush()`, `iteration`, `fetch_optimizer_state()` and
    `close()`. Any method may raise a `JobError`, after which the session is of no more use.

    Args:
        model: to train.
        params: its trained parameters with their names, the most urgent first.
        optimizers: that have `params`.
        groups: of `optimizers`.
        values: the servers' parameters.
        rank, global_rank: of this process in its group, and in the whole job.
        scale: factor for each gradient before it is sent: 1 / ranks if ranks run in step, else 1.
        staleness: as for `attach_to_servers`.
        buffers: keeps the model's buffers equal to rank 0's; None to leave them alone.
        after_close: called with the session once it is detached.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        params: Sequence[tuple[str, torch.nn.Parameter]],
        optimizers: Sequence[torch.optim.Optimizer],
        groups: ParameterGroups,
        values: Values,
        *,
        rank: int,
        global_rank: int,
        scale: float,
        staleness: int | None,
        buffers: Broadcasts | None,
        after_close: Callable[[ServedSession], None],
    ) -> None:
        super().__init__(model)
        self.rank, self.staleness = rank, staleness
        self._global_rank = global_rank
        self._names = [name for name, _ in params]
        self._params = [param for _, param in params]
        self._tensor_of = {id(param): tensor for tensor, param in enumerate(self._params)}
        self._groups, self._values = groups, values
        self._scale, self._buffers, self._after_close = scale, buffers, after_close
        self._iteration = -1
        self._failure: JobError | None = None
        self._fired = [0] * len(params)
        self._expected = [0] * len(params)
        self._sent: list[SentGradient | None] = [None] * len(params)
        self._is_sent = [False] * len(params)
        self._rules = groups.rules()
        self._unstepped: set[int] = set()  # sent, and `step()` has not been called for them
        # `step()` was called for them, and the new value is not copied yet
        self._awaited: set[int] = set()
        self._hidden: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._unguarded = {self._tensor_of[id(param)] for param in parameters_of_scripts(model) if id(param) in self._tensor_of}
        self._versions = [param._version for param in self._params]
        self._optimizers = list(optimizers)
        self._has_warned = False
        self._has_states = True  # whether the optimizers have the servers' state
        self._attach_hooks(self._params, self._optimizers)
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_load_state_dict_pre_hook(Hook(self._refuse_load_state_dict)))

    # -- forward ---------------------------------------------------------------------------------------

    @in_turn
    def _before_forward(self, module: torch.nn.Module, compiling: bool, _: Any) -> None:
        self.check()
        if inside_a_backward_pass():
            return  # activation checkpointing runs the model again
        self._refuse_wrappers(inside=False)
        trains = torch.is_grad_enabled() and module.training
        if self._in_backward and trains:
            self._fail("the backward pass was left unfinished (an exception that the script caught?)")
        if compiling or is_compiled(self.model):
            self.flush()
        else:
            self._hook_compiled_parts()
        if self._buffers is not None:
            self._buffers.before_forward()

    def _before_compiled(self, module: torch.nn.Module, compiling: bool, _: Any) -> None:
        """Wait for the parameters of compiled code, which reads them without Python, so that no
        guard sees it.
        """
        for param in module.parameters():
            if id(param) in self._tensor_of:
                self._make_current(self._tensor_of[id(param)])

    def _before_compiled_code(self, module: torch.nn.Module | None) -> None:
        if module is None:
            self.flush()
        else:
            self._before_compiled(module, True, None)

    def _after_forward(self, module: torch.nn.Module, compiling: bool, output: Any) -> None:
        if not torch.is_grad_enabled() or inside_a_backward_pass():
            return
        if self._forward_ended(module, output) and self._buffers is not None:
            self._buffers.after_forward()

    # -- backward --------------------------------------------------------------------------------------

    @in_turn
    def _begin(self) -> None:
        self.check()
        if self._forward_summed is None and self._buffers is not None and not self._has_warned and self.rank == 0:
            self._has_warned = True
            log.warning("gradlane: %s", UNSEEN_FORWARD)
        if any(self._is_sent[tensor] for tensor in self._unstepped):
            self._fail(
                "a backward pass begins, and step() was not called after the last one, whose gradients are on the servers. To "
                "accumulate, run all passes but the last inside session.no_sync(); a step cannot be left out (GradScaler)",
                UnsupportedError,
            )
        self.flush()
        self._wait_for_unstepped()
        if self._was_evaluated and self._buffers is not None:
            self._buffers.after_forward()
        self._was_evaluated = False
        self._rules = self._groups.rules()
        self._values.set_rules(self._rules)
        self._iteration += 1
        self._in_backward = True
        if self._has_states:
            self._has_states = False
            for param in self._params:
                self._groups.states_of(param).pop(param, None)
        self._fired = [0] * len(self._params)
        self._is_sent = [False] * len(self._params)
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    @property
    def _counting(self) -> bool:
        return self._iteration == 0

    def _name_of(self, tensor: int) -> str:
        return self._names[tensor]

    def _refuse_replaced(self) -> None:
        for name, param in zip(self._names, self._params, strict=True):
            if self._is_replaced(param, name):
                self._fail(f"{name} was replaced since attach: close() the session before, and attach again", UnsupportedError)

    def _launch(self, tensor: int) -> None:
        gradient = self._params[tensor].grad
        assert gradient is not None
        torch.mul(gradient.detach(), self._scale, out=self._values.slots[tensor])
        self._sent[tensor] = SentGradient(gradient)
        self._is_sent[tensor] = True
        self._unstepped.add(tensor)
        self._values.send(tensor)

    @in_turn
    def _end(self) -> None:
        """End the backward pass. For a parameter without a new gradient, send what is in `.grad`,
        as `step()` would use it.
        """
        if self._counting:
            self._expected = [max(1, fired) for fired in self._fired]
        for tensor, param in enumerate(self._params):
            if self._is_sent[tensor]:
                continue
            if param.grad is not None and any(self._fired):
                self._launch(tensor)
            else:
                self._unstepped.add(tensor)
                self._values.send_none(tensor)
        self._forward_summed = None
        self._in_backward = False

    # -- step ------------------------------------------------------------------------------------------

    @in_turn
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, compiling: bool) -> tuple[Any, Any] | None:
        with given_up():  # the script's closure may start threads, and its backward pass runs in autograd's
            instead = run_first(optimizer, args, kwargs)
        self.check()
        if self._groups.rules() != self._rules:
            self._fail(
                "the learning rate, or another number of the optimizer, changed between backward() and step(), when the "
                "gradients had left: change it after step() or before backward()",
                UnsupportedError,
            )
        tensors = []
        for group in optimizer.param_groups:
            for param in group["params"]:
                tensor = self._tensor_of.get(id(param))
                if tensor is None:
                    continue
                self._check_gradient(tensor, param)
                if param.grad is not None:
                    self._hidden.append((param, param.grad))
                    param.grad = None
                self._sent[tensor] = None
                tensors.append(tensor)
        self._unstepped.difference_update(tensors)
        self._awaited.update(tensors)
        for tensor in tensors:
            if tensor in self._unguarded:
                self._values.wait_for(tensor)
        self._copy_arrived(tensor for tensor in tensors if self._values.has_arrived(tensor))
        return instead

    def _check_gradient(self, tensor: int, param: torch.nn.Parameter) -> None:
        if tensor not in self._unstepped:
            self._fail(
                f"step() without a backward pass before it: the update of {self._names[tensor]} is done where its gradient "
                "arrives, once",
                UnsupportedError,
            )
        sent = self._sent[tensor]
        if sent is not None and not sent.is_unchanged_in(param):
            self._fail(
                f"the gradient of {self._names[tensor]} was changed between backward() and step() (clip_grad_norm_, "
                "GradScaler, zero_grad?), when it had left for the servers; update on the workers (gradlane.attach) to do that",
                UnsupportedError,
            )

    @in_turn
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for param, gradient in self._hidden:
            param.grad = gradient
        self._hidden.clear()
        for tensor in self._awaited:
            guards.watch(self._params[tensor], tensor, self._make_current)

    # -- values ----------------------------------------------------------------------------------------

    def _make_current(self, tensor: int) -> None:
        """Wait for the new value of `tensor`, and copy every value that has arrived."""
        with turn, guards.as_ordinary():
            if tensor not in self._awaited:
                return
            self.check()
            with given_up():
                self._values.wait_for(tensor)
            self._copy_arrived([each for each in self._awaited if self._values.has_arrived(each)])

    def _copy_arrived(self, tensors: Iterable[int]) -> None:
        tensors = list(tensors)
        if not tensors:
            return
        for tensor in tensors:
            if self._params[tensor]._version != self._versions[tensor]:
                self._fail(
                    f"the script wrote to {self._names[tensor]}, and its value is the servers': close() the session, change "
                    "it, and attach again",
                    UnsupportedError,
                )
        self._copy(tensors)
        for tensor in tensors:
            self._awaited.discard(tensor)
            guards.unwatch(self._params[tensor])

    def _copy(self, tensors: Iterable[int]) -> None:
        tensors = list(tensors)
        with torch.inference_mode(False), torch.no_grad():
            torch._foreach_copy_(
                [self._params[tensor] for tensor in tensors], [self._values.slots[tensor] for tensor in tensors]
            )
        for tensor in tensors:
            self._versions[tensor] = self._params[tensor]._version

    def _before_optimizer_state_dict(self, *_: Any, **__: Any) -> None:
        if not self._has_states:
            raise UnsupportedError(
                "optimizer.state_dict() while the update is on the servers, which have the state: let every rank call "
                "session.fetch_optimizer_state() before"
            )

    def _refuse_load_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            "optimizer.load_state_dict() while the update is on the servers, which have it: load it before attaching, or "
            "close() the session, load, and attach again"
        )

    def _wait_for_unstepped(self) -> None:
        for tensor in self._unstepped:
            self._values.wait_for(tensor)
        self._unstepped.clear()

    # -- what a training script calls ------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """Index of the last backward pass that sent gradients, from 0; -1 before the first."""
        return self._iteration

    @property
    def failed(self) -> bool:
        """Whether the job has failed, on this rank or another."""
        return self._failure is not None or self._values.failure() is not None

    def check(self) -> None:
        """Raise the error that ended the job, if there is one."""
        if self._failure is not None:
            raise self._failure
        self._values.check()

    def flush(self) -> None:
        """Wait until the model has every parameter of the last step."""
        self.check()
        while self._awaited and not self._in_backward:
            self._make_current(next(iter(self._awaited)))

    def _settle(self) -> None:
        self.flush()

    def fetch_optimizer_state(self) -> None:
        """Copy the servers' optimizer state to this rank's optimizers, until the next backward
        pass.

        For checkpoints: call it between `step()` and the next backward pass, on every rank in the
        same iteration unless staleness is None.
        """
        self.flush()
        self._wait_for_unstepped()
        for param, state in zip(self._params, fetched_states(self._values), strict=True):
            if state:
                self._groups.states_of(param)[param] = state
        self._has_states = True

    def close(self) -> None:
        """Wait until every rank has called `close`, copy the servers' parameters and state, and
        detach.

        All ranks then have the same parameters, updated by every gradient, and the same optimizer
        state. A rank that is ahead waits for as long as the others train. After a failure it only
        detaches.
        """
        if self._closed:
            return
        try:
            if not self.failed and not self._in_backward:
                self.flush()
                if self._buffers is not None:
                    self._buffers.close()
                self._wait_for_unstepped()
                self._values.meet()
                if self.staleness != 0:
                    self._values.fetch("parameters")
                    self._copy(range(len(self._params)))
                self.fetch_optimizer_state()
                self._values.meet()
        finally:
            self._detach_hooks()
            guards.unwatch_all(self._params)
            self._refuse_what_is_awaited()
            self._values.close()
            self._after_close(self)

    def _refuse_what_is_awaited(self) -> None:
        """Refuse reads of parameters that a failed job has left without their new values."""
        why = str(self._failure or self._values.failure() or "close() was interrupted")
        for tensor in self._awaited:
            lacks = f"{self._names[tensor]} lacks its last value: the servers had not sent it when the job failed ({why})"
            outdated.refuse_reads(self._params[tensor], f"{lacks}. {outdated.ADVICE}")

    def abort(self, error: BaseException) -> None:
        """Fail the job with `error`; the other ranks raise `PeerFailed` with its text."""
        text = f"rank {self._global_rank} failed: {type(error).__name__}: {error}"
        if self._failure is None:
            self._failure = error if isinstance(error, JobError) else PeerFailed(text, self._global_rank)
        self._values.abort(text)

    def _fail(self, text: str, kind: type[JobError] | type[UnsupportedError] = JobError) -> NoReturn:
        error = kind(f"rank {self._global_rank}, iteration {self._iteration}: {text}")
        self.abort(error)
        raise error
