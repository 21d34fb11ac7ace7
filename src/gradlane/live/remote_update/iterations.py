"""ServedIterations: what one rank of a job does whose parameters are on servers. Everything here runs on the
training thread, but for reads of parameters.

One iteration:

    forward     the first use of a parameter waits until its new value has arrived (`live/session/updates.py`)
    backward    `begin` sends the servers optimizer options that have changed, `complete`
                each gradient, `_end` which parameters had none
    step        defers every update: gradients are hidden from the optimizer, so that it updates nothing, and
                then the values that have arrived are copied

Gradients have been sent when `backward()` returns. So a script that changes a gradient or an
optimizer option between `backward()` and `step()` is too late, which raises an error. So does a
script that writes to a parameter, since the servers' value would not change.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import torch

from gradlane.errors import GradlaneError, InputError, JobError, PeerFailed, UnsupportedError, described, told_of
from gradlane.live.comm.turn import given_up, in_turn, turn
from gradlane.live.remote_update.broadcasts import Broadcasts
from gradlane.live.remote_update.parameter_groups import ParameterGroups
from gradlane.live.remote_update.served_actions import ServedActions, ServedStep
from gradlane.live.remote_update.states import KnownStates, fetched_states
from gradlane.live.remote_update.values import SentGradient, Values
from gradlane.live.session import guarded_states, outdated
from gradlane.live.session.aliases import Aliases
from gradlane.live.session.closures import run_first
from gradlane.live.session.frozen import Frozen
from gradlane.live.session.hooks import (
    Hook,
    come_last,
    inside_a_backward_pass,
    is_compiled,
    is_last,
    is_traced,
    parameters_of_scripts,
)
from gradlane.live.session.interruptions import wrap_handlers
from gradlane.live.session.job import Job
from gradlane.live.session.open_calls import OpenCalls
from gradlane.live.session.passes import UNSEEN_FORWARD, Passes
from gradlane.live.session.phases import TWICE, Event, NotAllowedError, Phase
from gradlane.live.session.tracked import Tracked, all_go_on
from gradlane.live.session.updates import Updates
from gradlane.transport import Rule

log = logging.getLogger("gradlane")
_HELD = (
    "something else holds the memory of parameters (a state_dict that was kept, a view, a NumPy array, another process): "
    "step() waits for the new values of these until it is gone; del a checkpoint once it is saved"
)


class ServedIterations:
    """The iterations of a model whose parameters are on servers: the `passes.Listener` of its model.

    Args:
        job: the model, with its trained parameters in the order of `values`.
        groups: of the job's optimizers.
        values: the servers' parameters, with the plan in force.
        staleness: as for `attach_to_servers`.
        buffers: keeps the model's buffers equal to rank 0's; None to leave them alone.
    """

    def __init__(
        self, job: Job, groups: ParameterGroups, values: Values, staleness: int | None, buffers: Broadcasts | None
    ) -> None:
        self._model = job.model
        self.rank, self.staleness = job.rank, staleness
        self._global_rank = job.global_rank
        self.tracked = [Tracked(name, param, tensor) for tensor, (name, param) in enumerate(job.params)]
        self._of = {id(tracked.param): tracked for tracked in self.tracked}
        self._groups, self._values, self.buffers = groups, values, buffers
        self._optimizers = job.optimizers
        self._frozen = Frozen(job.model.named_parameters())
        # ranks that run in step have one update of the gradients' average
        self._scale = 1.0 / job.world if staleness == 0 else 1.0
        self.iteration = -1
        self.failure: JobError | None = None
        self._sent: list[SentGradient | None] = [None] * len(job.params)
        self._rules = groups.rules()
        # servers have no parameter without elements, and an optimizer would make state for its gradient
        self._without_elements = [
            param for one in job.optimizers for group in one.param_groups for param in group["params"] if not param.numel()
        ]
        for param in parameters_of_scripts(job.model):
            if id(param) in self._of:
                self._of[id(param)].unguarded = True
        self.actions = ServedActions(self, values, lambda tracked: self._updates.use(tracked, _nothing), self.flush)
        self._updates: Updates[ServedStep] = Updates(turn, self.actions)
        self._told: set[str] = set()
        self._held: set[Tracked] = set()  # of the step that runs; see `aliases.py`
        self._calls = OpenCalls()
        # what the optimizers have of the servers' state; None while they have nothing
        self._states: KnownStates | None = KnownStates(self._states_here())
        self.passes = Passes(job.model, self.tracked, job.optimizers, self)
        for optimizer in job.optimizers:
            self.passes.hold(optimizer.register_load_state_dict_pre_hook(Hook(self._refuse_load_state_dict)))

    # -- forward ---------------------------------------------------------------------------------------

    @in_turn
    def before_forward(self, module: torch.nn.Module, compiling: bool, nested: bool) -> None:
        self.check()
        wrap_handlers()
        trains = torch.is_grad_enabled() and module.training
        if self.in_backward and inside_a_backward_pass():  # a checkpoint runs it once more, or a hook calls it
            if not nested:
                self._take_buffers(module, self._calls.begin_within(trains))
            return
        if is_traced():
            self.flush()  # only the model must be recorded
            return
        self.passes.refuse_wrappers(inside=False)
        if self.in_backward and trains:
            self.fail("the backward pass was left unfinished (an exception that the script caught?)")
        fault = self._frozen.fault if trains else None
        if fault is not None:
            self.fail(fault)
        if compiling or is_compiled(self._model) or not trains:  # an evaluation may read parameters by any way
            self.flush()
        else:
            self.passes.hook_compiled_parts()
        if not nested:
            self._take_buffers(module, self._calls.begin(trains))

    def _take_buffers(self, module: torch.nn.Module, again: bool) -> None:
        """Take over rank 0's buffers, as DDP does at the start of each call; `again` if the call before did not end."""
        if self.buffers is None:
            return
        if again:
            self.buffers.forward_raised()
        self.buffers.before_forward(module.training)

    def before_compiled_code(self, module: torch.nn.Module | None) -> None:
        if module is None:
            self.flush()
        else:
            self.passes.before_compiled(module)

    def after_forward(self, module: torch.nn.Module, nested: bool, output: Any) -> None:
        if is_traced():
            return
        if self.in_backward and inside_a_backward_pass():
            if not nested:
                self._calls.end_within()
                if self.buffers is not None and self.passes.sync and torch.is_grad_enabled() and module.training:
                    self.buffers.after_forward()
            return
        if not nested:
            self._calls.end()
        if not torch.is_grad_enabled():
            return
        if self.passes.forward_ended(module, nested, output) and self.buffers is not None:
            self.buffers.after_forward()

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass runs, whose gradients are sent."""
        return self._updates.in_backward

    # -- backward --------------------------------------------------------------------------------------

    @in_turn
    def begin(self) -> None:
        self.check()
        if not self.passes.forward_was_seen and self.buffers is not None:
            self._tell(UNSEEN_FORWARD)
        if self._awaits_step:
            self.fail(
                "a backward pass begins, and step() was not called after the last one, whose gradients are on the servers. To "
                "accumulate, run all passes but the last inside session.no_sync(); a step cannot be left out (GradScaler); "
                "optimizers that were not attached do not count",
                UnsupportedError,
            )
        self.flush()
        self.wait_for_unstepped()
        if self.passes.was_evaluated and self.buffers is not None:
            self.buffers.after_forward()
        self._rules = self._rules_now()
        try:
            self._values.set_rules(self._rules)
        except InputError as error:  # perhaps of this rank alone
            self.fail(f"the optimizer's numbers: got {error}", InputError)
        except UnsupportedError as error:
            self.fail(str(error), UnsupportedError)
        self.iteration += 1
        self._values.begin(self.iteration)
        self._updates.begin(self.tracked, ())
        self._leave_states_to_the_servers()
        for optimizer in self._optimizers:
            if not is_last(optimizer):
                come_last(optimizer)
        self.passes.backward_begins()
        self.passes.call_at_end(self._end)

    def _rules_now(self) -> list[Rule]:
        try:
            return self._groups.rules()
        except UnsupportedError as error:
            self.fail(str(error), UnsupportedError)

    def _tell(self, text: str) -> None:
        """Log `text` once, on rank 0."""
        if self.rank == 0 and text not in self._told:
            self._told.add(text)
            log.warning("gradlane: %s", text)

    @property
    def counting(self) -> bool:
        """Whether this iteration counts how often each hook fires in a backward pass."""
        return self.iteration == 0

    def complete(self, tracked: Tracked) -> None:
        """The gradient of a parameter is complete: send it."""
        self._has_come(tracked)
        self.may_be_complete(tracked)
        self._send(tracked)

    def may_be_complete(self, tracked: Tracked) -> None:
        """Put a gradient into its slot; while hooks are counted, it is sent when the backward pass ends."""
        gradient = tracked.param.grad
        assert gradient is not None
        torch.mul(gradient.detach(), self._scale, out=self._values.slots[tracked.tensor])
        self._sent[tracked.tensor] = SentGradient(gradient)

    def _has_come(self, tracked: Tracked) -> None:
        try:
            tracked.happens(Event.GRADIENT)
        except NotAllowedError as error:
            self.fail(str(error))

    def _send(self, tracked: Tracked) -> None:
        self._values.send(tracked.tensor)
        tracked.happens(Event.SEND)

    def arrived_again(self, tracked: Tracked) -> None:
        """The gradient of a parameter has come once more: the job ends."""
        self.fail(TWICE.format(name=tracked.name, fired=tracked.fired, expected=tracked.expected))

    @in_turn
    def _end(self) -> None:
        """End the backward pass. For a parameter without a new gradient, send what is in `.grad`,
        as `step()` would use it.
        """
        self.passes.count()
        has_any = any(tracked.fired for tracked in self.tracked)
        for tracked in self.tracked:
            if tracked.phase is Phase.SENT:
                continue
            if self.counting and tracked.fired:
                self._has_come(tracked)
                self._send(tracked)
            elif tracked.param.grad is not None and has_any:
                self.complete(tracked)
            else:
                self._values.send_none(tracked.tensor)
                tracked.happens(Event.LACK)
        self._values.flush()
        self.passes.backward_ended()
        self._updates.end(self.tracked)

    # -- step ------------------------------------------------------------------------------------------

    @in_turn
    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, compiling: bool) -> tuple[Any, Any] | None:
        with given_up():  # the script's closure may start threads, and its backward pass runs in autograd's
            instead = run_first(optimizer, args, kwargs)
        self.check()
        if not is_last(optimizer):
            self.fail(
                "a step pre-hook runs after gradlane's, which hides the gradients: let optimizer.register_step_pre_hook(hook) "
                "register it, not the function of the class; or register it before the backward pass",
                UnsupportedError,
            )
        self._refuse_what_is_not_served(optimizer)
        if self._rules_now() != self._rules:
            self.fail(
                "the learning rate, or another number of the optimizer, changed between backward() and step(), when the "
                "gradients had left: change it after step() or before backward()",
                UnsupportedError,
            )
        stepped = [
            self._of[id(param)] for group in optimizer.param_groups for param in group["params"] if id(param) in self._of
        ]
        for tracked in stepped:
            self._check_gradient(tracked)
            self._sent[tracked.tensor] = None
        for param in self._without_elements:
            param.grad = None
        wrap_handlers()
        late = self._values.late([tracked.tensor for tracked in stepped])
        if late:
            aliases = Aliases(optimizer, self.tracked)
            self._held = {
                tracked for tracked in stepped if tracked.tensor in late and not tracked.unguarded and aliases.of(tracked)
            }
        if self._held:
            self._tell(_HELD)
        self._updates.step(stepped, stepped, ServedStep() if stepped else None)
        return instead

    def _refuse_what_is_not_served(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a parameter that is trained now, and that was frozen at attach or not there."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        new = next(
            (
                param for param in params
                if id(param) not in self._of and param.requires_grad and param.numel() and param.grad is not None
            ),
            None,
        )  # fmt: skip
        if new is not None:
            name = next((name for name, param in self._model.named_parameters() if param is new), "a parameter")
            self.fail(
                f"{name} of shape {tuple(new.shape)} has a gradient, and servers have no value of it, since it was "
                "frozen at attach, or not there: close() the session before you train it, and attach again",
                UnsupportedError,
            )

    def _check_gradient(self, tracked: Tracked) -> None:
        if tracked.phase is not Phase.AWAITED:
            self.fail(
                f"step() without a backward pass before it: the update of {tracked.name} is done where its gradient "
                "arrives, once",
                UnsupportedError,
            )
        sent = self._sent[tracked.tensor]
        if sent is not None and not sent.is_unchanged_in(tracked.param):
            self.fail(
                f"the gradient of {tracked.name} was changed between backward() and step() (clip_grad_norm_, "
                "GradScaler, zero_grad?), when it had left for the servers; update on the workers (gradlane.attach) to do that",
                UnsupportedError,
            )

    @in_turn
    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._updates.stepped()
        deferred = list(self._updates)
        if self._values.plan.crosses_barrier:
            late = self._values.late([tracked.tensor for tracked in deferred])
            deferred = [
                tracked for tracked in deferred if tracked.unguarded or tracked in self._held or tracked.tensor not in late
            ]
        self._updates.make(deferred)
        self._held.clear()

    # -- values ----------------------------------------------------------------------------------------

    def before_optimizer_state_dict(self, *_: Any, **__: Any) -> None:
        if self._states is None:
            self._refuse_state("optimizer.state_dict()")

    def _refuse_state(self, what: str = "optimizer.state is used, or the optimizer is copied,") -> NoReturn:
        raise UnsupportedError(
            f"{what} while the update is on the servers, which have the state: call session.fetch_optimizer_state() before"
        )

    def _refuse_changed_states(self) -> None:
        place = None if self._states is None else self._states.changed(self._states_here())
        if place is not None:
            self.fail(
                f"the script changed the optimizer's state of {self.tracked[place].name}, and the servers have their own: "
                "close() the session, change it, and attach again",
                UnsupportedError,
            )

    def _states_here(self) -> list[dict[str, Any]]:
        """What the optimizers have of the state of each parameter."""
        return [self._groups.states_of(tracked.param).get(tracked.param, {}) for tracked in self.tracked]

    def _leave_states_to_the_servers(self) -> None:
        """Their state changes from now on, and the optimizers have none."""
        if self._states is None:
            return
        self._refuse_changed_states()
        self._states = None
        for tracked in self.tracked:
            self._groups.states_of(tracked.param).pop(tracked.param, None)
        for optimizer in self._optimizers:
            guarded_states.watch(optimizer, self, self._refuse_state)

    def _refuse_load_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            "optimizer.load_state_dict() while the update is on the servers, which have it: load it before attaching, or "
            "close() the session, load, and attach again"
        )

    @property
    def _awaits_step(self) -> bool:
        """Whether no optimizer has stepped yet with gradients that the servers have."""
        return self.in_backward or any(self._sent[tracked.tensor] is not None for tracked in self._unstepped)

    @property
    def _unstepped(self) -> list[Tracked]:
        """Whose gradients, or the word that there are none, are on the servers, and no optimizer has stepped."""
        return [tracked for tracked in self.tracked if tracked.phase is Phase.AWAITED]

    def wait_for_unstepped(self) -> None:
        """Wait for the values that no step will ask for."""
        self.actions.wait_for(self._unstepped)

    def take_unstepped(self) -> None:
        """Copy those values: the session ends, and the servers' state goes with them."""
        self.wait_for_unstepped()
        if self._unstepped:
            self.actions.copy(self._unstepped)

    def flush(self) -> None:
        """Wait until the model has every parameter of the last step."""
        self.check()
        self._updates.settle()

    def before_state_dict(self, *_: Any, **__: Any) -> None:
        """The model's state is saved or loaded."""
        self.flush()

    def fetch_optimizer_state(self) -> None:
        """Copy the servers' optimizer state to this rank's optimizers, until the next backward pass."""
        self.check()
        if self._awaits_step:
            self.fail(
                "fetch_optimizer_state() before step(), when the gradients are on the servers: call it between step() and the "
                "next backward pass",
                UnsupportedError,
            )
        self._refuse_changed_states()
        self.fetch_states()

    def fetch_states(self) -> None:
        """As `fetch_optimizer_state`, whatever the script has done."""
        self.flush()
        self.wait_for_unstepped()
        all_go_on(self._unstepped, Event.STEP)  # their slots have the state from here on, which no step must copy
        fetched = fetched_states(self._values)
        for optimizer in self._optimizers:
            guarded_states.unwatch(optimizer, self)
        for tracked, state in zip(self.tracked, fetched, strict=True):
            if state:
                self._groups.states_of(tracked.param)[tracked.param] = state
        self._states = KnownStates(self._states_here())

    # -- failing, forks and signals --------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether the job has failed, on this rank or another."""
        return self.failure is not None or self._values.failure() is not None

    def check(self) -> None:
        """Raise the error that ended the job, if there is one."""
        if self.failure is not None:
            raise self.failure
        self._values.check()

    def abort(self, error: BaseException) -> None:
        """Fail the job with `error`; the other ranks raise `PeerFailed` with its text."""
        text = told_of(self._global_rank, "failed", described(error))
        if self.failure is None:
            self.failure = error if isinstance(error, JobError) else PeerFailed(text, self._global_rank)
        self._values.abort(text)

    def fail(self, text: str, kind: type[GradlaneError] = JobError) -> NoReturn:
        """Raise an error of `kind` with `text`, and tell the other ranks."""
        error = kind(f"rank {self._global_rank}, iteration {self.iteration}: {text}")
        self.abort(error)
        raise error

    def is_busy_here(self) -> bool:
        """False: every change here is made in turn, and a signal's handler looks at the turn by itself."""
        return False

    def before_fork(self) -> None:
        """Copy all values that are on their way, unless the job has failed."""
        if not self.failed:
            self.flush()

    def in_child(self) -> None:
        """Detach from the model, in a child process that has no other thread."""
        self.passes.sync = False
        self.passes.close()
        self._updates.give_up(self.tracked, str(self.failure or "this process was forked meanwhile"))

    def give_up(self) -> None:
        """The session ends: refuse reads of parameters that a failed job has left without their new values, and of the state
        that it has left on the servers.
        """
        why = str(self.failure or self._values.failure() or "close() was interrupted")
        self._updates.give_up(self.tracked, why)
        for optimizer in self._optimizers if self._states is None else ():
            guarded_states.unwatch_for_all(optimizer)
            lacks = f"the state of {type(optimizer).__name__} was on the servers when the job failed ({why})"
            outdated.refuse_state(optimizer, f"{lacks}. Load a checkpoint before anything reads it")


def _nothing() -> None:
    """Nobody counts which parameters are used."""
