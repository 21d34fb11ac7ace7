"""Steps: what a session does around `optimizer.step()`.

The optimizer updates what has arrived, and the rest is deferred. If the updates of a step cannot be deferred, the session
waits for all sums first, as DDP does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradlane.errors import UnsupportedError
from gradlane.live.comm.recorder import now_ns
from gradlane.live.comm.turn import given_up, in_turn
from gradlane.live.session import guarded_params
from gradlane.live.session.aliases import Aliases
from gradlane.live.session.closures import closure_of, run_first
from gradlane.live.session.deferred_step import DeferredStep, is_replaced, is_stepping, keeps_no_gradient, mode_of_step
from gradlane.live.session.frozen import not_summed
from gradlane.live.session.hooks import is_last
from gradlane.live.session.interruptions import wrap_handlers
from gradlane.live.session.parts import Parts
from gradlane.live.session.patience import Patience
from gradlane.live.session.phases import Event, NotAllowedError, Phase
from gradlane.live.session.script_lines import reader
from gradlane.live.session.tracked import Tracked

_NEEDED_EARLY = 5  # steps in a row after which a script is taken to need all updates at once


class Steps:
    """The steps of the optimizers of one session. Used on the training thread, but for `updates_are_needed`.

    Args:
        parts: of the session.
        watch_all: guards all parameters, to find out when they are used.

    Attributes:
        runs_closure: the step that runs was given a closure, which the optimizer calls itself.
    """

    def __init__(self, parts: Parts, watch_all: Callable[[], None]) -> None:
        self._parts, self._watch_all = parts, watch_all
        self._driver, self._updates, self._verifier = parts.driver, parts.updates, parts.verifier
        self._patience = Patience()
        self._began_ns = 0
        self._stepped: list[Tracked] = []  # parameters of the optimizer whose step runs or ran last
        # steps in a row whose deferred updates had all run when the next forward pass began
        self._needed_early = 0
        self._needed_by = ""  # what needed them first, of those steps
        self._held = False  # since the last forward pass aliases kept updates from being deferred
        self._held_steps = 0  # steps in a row that deferred nothing else
        self._ranked_as_held = False  # the planner takes this script for one that keeps the barrier, until aliases are gone
        self.runs_closure = False
        # ids of the parameters that were in the model at attach, or that an optimizer has stepped since
        self._looked_at = {id(param) for param in parts.job.model.parameters()}

    def go_on_after_an_error(self, besides: int = 0) -> None:
        """The script may have caught an error of an optimizer's step, and trains on.

        Args:
            besides: how many steps have just begun on this thread.
        """
        if self._updates.hides and not is_stepping(sys._getframe(), besides):
            self._updates.abandon()
        self._parts.actions.refuse_to_go_on()

    # -- before -------------------------------------------------------------------------------------

    @in_turn
    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, compiling: bool) -> tuple[Any, Any] | None:
        """An optimizer is about to update, see `hooks.around_step`."""
        parts = self._parts
        self.go_on_after_an_error(besides=1)
        self._verifier.drop_what_has_raised()
        self._updates.step_again()
        with given_up():  # the script's closure may start threads, and its backward pass runs in autograd's
            instead = run_first(optimizer, args, kwargs)
        parts.failures.check()
        parts.gpu.refuse_capture("optimizer.step()")
        of = parts.tracked_of
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._stepped = [tracked for param in params if (tracked := of.get(id(param))) is not None]
        if len(self._stepped) < len(params):
            self._tell_of_added(params)
        if self._updates.in_backward:
            self._refuse_inside()
            return instead
        if any(tracked.step is not None and tracked.step.optimizer is optimizer for tracked in self._updates):
            self._updates.settle()  # a second step() before its updates were needed
        self.runs_closure = instead is None and closure_of(args, kwargs) is not None
        needs_all = parts.may_cross and self._needs_all(optimizer, compiling)
        self._split(optimizer, defer=parts.crosses and not needs_all)
        # a closure that the optimizer runs itself may change the gradients that verification would take now
        if not self.runs_closure:
            self._verifier.stepping(optimizer, self._is_owed)
        self._began_ns = now_ns()
        parts.measuring.step_begins()
        return instead

    def _tell_of_added(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Say of a parameter that the script has put into the model after attach that it is not summed."""
        new = {id(param) for param in params if param.requires_grad} - self._looked_at
        if not new:
            return
        self._looked_at |= new
        job = self._parts.job
        name = next((name for name, param in job.model.named_parameters() if id(param) in new), None)
        if name is not None:
            again = "wrap the model again" if job.wrapped else "close() the session and attach again"
            self._parts.tell("added", not_summed(f"{name} was put into the model after gradlane attached", again))

    def _refuse_inside(self) -> None:
        try:
            for tracked in self._stepped:
                tracked.happens(Event.STEP)
        except NotAllowedError as error:
            self._parts.fail(str(error), UnsupportedError)

    def _needs_all(self, optimizer: torch.optim.Optimizer, compiling: bool) -> bool:
        """Whether the updates of this call of `step` cannot be deferred.

        Args:
            optimizer: the one that steps.
            compiling: it is compiled. A deferred update would not be, and may round otherwise (seen with
                PyTorch 2.6).
        """
        kind, mode = type(optimizer).__name__, mode_of_step()
        reasons = (
            ("closure", self.runs_closure, f"{kind}.step(closure) keeps the barrier"),
            ("mode", mode, f"{kind}.step inside {mode} keeps the barrier"),
            (
                "replaced step",
                is_replaced(optimizer),
                f"{kind}.step, or a function that it calls, is not torch's: it keeps the barrier",
            ),
            ("compiled step", compiling, f"{kind}.step is compiled: it keeps the barrier"),
            (
                "hook",
                not is_last(optimizer),
                "a step pre-hook runs after gradlane's and may read gradients: such steps wait for all sums",
            ),
        )
        found = [(key, text) for key, holds, text in reasons if holds]
        for key, text in found:
            self._parts.tell(key, text)
        # a GradScaler gives a fused optimizer its scale for the time of one call
        return bool(found) or hasattr(optimizer, "grad_scale")

    def _split(self, optimizer: torch.optim.Optimizer, defer: bool) -> None:
        """Leave in `.grad` what the optimizer may use now, and defer what has not arrived.

        Args:
            optimizer: the one that steps.
            defer: updates may be deferred; if not, wait for all of its sums.
        """
        parts, stepped = self._parts, self._stepped
        if not parts.settled:  # torch chooses kernels by the class of a parameter, and another optimizer may have stepped
            guarded_params.unwatch(stepped)
        if self._updates:
            self._updates.make(stepped)  # another optimizer has deferred them, and stepped first
        all_are_there = self._driver.all_are_there
        now = parts.gradients.that_stand_for_sums(stepped)
        late: list[Tracked] = []
        if not all_are_there and defer and not self._all_arrive_soon(now):
            now, late = self._late_among(optimizer, now)
        # nothing is hidden until the last wait is over, in which a signal handler or another thread may read anything
        tensors = [tracked.tensor for tracked in now]
        self._driver.wait_for(tensors)
        # GradScaler has such an optimizer leave out the step by itself
        if not hasattr(optimizer, "grad_scale"):
            parts.finite.updates(tensors)
        if self._verifier.verifies:
            for tracked in now:
                self._verifier.arrived(tracked.param, tracked.slot)
        parts.gradients.change(now)
        if keeps_no_gradient(optimizer) and is_last(optimizer):  # a hook of the script's after this one may keep gradients
            parts.gradients.lend(now)
        else:
            for tracked in now:
                parts.gradients.give(tracked)
        if late:
            wrap_handlers()
        self._updates.step(stepped, late, DeferredStep(optimizer, now) if late else None)

    def _all_arrive_soon(self, several: Sequence[Tracked]) -> bool:
        """Wait for the sums of `several`, if that may take less time than to defer their updates."""
        if self._parts.backend.has_streams:
            return False
        late = self._driver.late([tracked.tensor for tracked in several])
        limit_ns = self._patience.limit_ns(len(late), self._driver.told_if_awaited)
        if not limit_ns:
            return False
        came = self._driver.wait_briefly(limit_ns)
        self._patience.waited(in_vain=not came)
        return came

    def _late_among(self, optimizer: torch.optim.Optimizer, several: Sequence[Tracked]) -> tuple[list[Tracked], list[Tracked]]:
        """Those of `several` to update now, and those whose updates are deferred: their sums have not arrived."""
        aliases = None
        others, late = [], []
        not_there = set(self._driver.late([tracked.tensor for tracked in several]))
        for tracked in several:
            if tracked.unguarded or tracked.tensor not in not_there:
                others.append(tracked)
                continue
            self._parts.was_late = True
            aliases = aliases or Aliases(optimizer, self._parts.tracked)
            if aliases.of(tracked):
                self._parts.tell(
                    "aliases",
                    f"something else holds the memory of {tracked.name} or of the optimizer's state of it (a state_dict that "
                    "was kept, a view, a NumPy array, another process): such parameters are updated at step(), not later, "
                    "until it is gone. If rank 0 keeps a checkpoint, rank 0 alone is slowed and the others wait for it; del it "
                    "once it is saved",
                )
                self._held = True
                others.append(tracked)
                continue
            late.append(tracked)
        return others, late

    def _is_owed(self, param: torch.nn.Parameter) -> bool:
        tracked = self._parts.tracked_of.get(id(param))
        return tracked is not None and tracked.phase is Phase.DEFERRED

    # -- after --------------------------------------------------------------------------------------

    @in_turn
    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer has updated what it may."""
        parts, now = self._parts, now_ns()
        parts.measuring.step_ended()
        self.runs_closure = False
        parts.actions.step_ran()
        self._verifier.all_updated(optimizer, self._is_owed)
        self._updates.stepped()
        parts.gradients.take_back()
        if not parts.settled:  # a parameter may be used before the forward pass
            self._watch_all()
        iteration = self._driver.iteration
        if iteration >= 0:
            updated = [tracked.tensor for tracked in self._stepped if tracked.step is None]
            parts.recorder.add_each("update", iteration, updated, self._began_ns, now)

    # -- until the next forward pass ----------------------------------------------------------------

    def updates_are_needed(self, of: str) -> None:
        """The script reads `of`, for which deferred updates have to be made."""
        if not self._needed_by and self._updates and self._parts.crosses:
            self._needed_by = reader(of)

    def keep_the_barrier_if_it_is_kept_anyway(self) -> None:
        """Stop deferring updates if the script needs them all before each next forward pass.

        Such a script gains nothing from deferred updates.
        """
        parts = self._parts
        if parts.was_late:
            self._note_late_step()
            parts.was_late = self._held = False
        if parts.crosses and parts.actions.were_used_elsewhere:
            parts.keep_the_barrier()
            parts.tell(
                "streams",
                "the model uses parameters on another stream than the one on which step() runs: from now on step() waits for "
                "all sums",
            )
        if parts.crosses and self._needed_early >= _NEEDED_EARLY:
            parts.keep_the_barrier()
            if not parts.has_told("read", "aliases"):
                parts.tell(
                    "early",
                    f"updates were needed before the next forward pass {_NEEDED_EARLY} steps in a row"
                    f"{self._needed_by and f' ({self._needed_by})'}: from now on step() waits for all sums",
                )

    def _note_late_step(self) -> None:
        """Count the step before this forward pass, in which there was something to defer."""
        deferred = len(self._updates) > 0
        if deferred:
            self._needed_early, self._needed_by = 0, ""
        elif not self._held:  # aliases go, and updates are deferred then
            self._needed_early += 1
        self._held_steps = self._held_steps + 1 if self._held and not deferred else 0
        planner = self._parts.planner
        if self._held_steps >= _NEEDED_EARLY and planner.crosses:
            planner.crosses, self._ranked_as_held = False, True  # for as long as all wait for the rank with the aliases
        elif deferred and self._ranked_as_held:
            planner.crosses, self._ranked_as_held = True, False
