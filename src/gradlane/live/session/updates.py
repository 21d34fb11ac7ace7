"""Updates: which updates `optimizer.step()` has left out, and who may see what until they are made.

`step()` leaves out an update whose sum has not arrived. It is made when its parameter is first used, together
with all others whose sums have arrived. These are the rules:

- A parameter whose update is deferred is guarded, and so is the state of its optimizer. The guard comes off
  last: a thread that meets it makes the update, or waits for the thread that does. Nobody sees a value
  between two steps.
- Whoever changes a phase has the turn (`turn.py`), and nobody keeps the turn while waiting. So whoever has
  waited looks again: other threads may have gone on as far as the next step.
- While an optimizer runs, late gradients are hidden from it. Other threads wait until it is over.
- Before a fork all deferred updates are made.
- An optimizer that raises in a deferred update ends the job, since some of its updates may have been made. So does one
  that has raised in the middle of its step, once the script trains on.
- Once the job has failed, a parameter that lacks its update refuses to be read.

What is done to tensors, optimizers and the network is behind `Actions`, so that nothing here knows of torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from gradlane.live.session.phases import Event, Phase
from gradlane.live.session.tracked import Tracked, all_go_on


class Step(Protocol):
    """One call of an optimizer's `step`, some of whose updates are deferred."""

    owes: int
    """How many have not been made."""

    def ended(self) -> None:
        """The last of them has been made."""


OneStep = TypeVar("OneStep", bound=Step)
OneStep_contra = TypeVar("OneStep_contra", bound=Step, contravariant=True)


class Actions(Protocol[OneStep_contra]):
    """What the rules are about. Called by a thread that has the turn."""

    as_ordinary: Callable[[], AbstractContextManager[Any]]
    """Within it, the calling thread uses guarded parameters as if they were not."""

    def check(self) -> None:
        """Raise the failure of the job, if there is one."""

    def is_stepping(self, thread: int) -> bool:
        """Whether an optimizer runs in `thread`."""

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for other threads, without the turn; `what` names it in errors."""

    def look_at_waits(self) -> None:
        """What a thread may wait for has come true."""

    def wait_for(self, several: Sequence[Tracked], /) -> None:
        """Wait for the sums of `several`, without the turn; or until another thread has begun the next iteration."""

    def wait_for_all(self) -> None:
        """Wait for every sum, as `wait_for` does."""

    def arriving_with(self, tracked: Tracked, several: Sequence[Tracked]) -> list[Tracked]:
        """The members of `several` (`tracked` is one) whose sums arrived with the sum of `tracked`."""

    def from_elsewhere(self, makes_updates: Callable[[], None]) -> None:
        """Call `makes_updates` where the last step ran, if the script is on another stream of a device now."""

    def hide(self, several: Sequence[Tracked], /) -> None:
        """Hide gradients from the optimizer that is about to step."""

    def show(self, several: Sequence[Tracked], /) -> None:
        """Put the gradients back."""

    def guard(self, several: Sequence[Tracked], /) -> None:
        """Have `Updates.use` called before anything reads one of the parameters."""

    def unguard(self, several: Sequence[Tracked], /) -> None:
        """Let the parameters be read."""

    def is_guarded(self, tracked: Tracked) -> bool:
        """Whether the parameter is guarded."""

    def guard_state(self, step: OneStep_contra) -> None:
        """Have `Updates.settle` called before anything reads the state of the optimizer of `step`."""

    def unguard_state(self, step: OneStep_contra) -> None:
        """Let that state be read, if no other session has deferred updates of the optimizer."""

    def update(self, step: OneStep_contra, several: Sequence[Tracked]) -> None:
        """Make the updates of `several`, whose sums are there."""

    def has_raised(self, step: OneStep_contra) -> None:
        """The call that has begun as `step` has raised, and what it was to defer is dropped."""

    def all_are_made(self) -> None:
        """No update is deferred."""

    def all_are_summed(self) -> None:
        """Every sum is there, and no update is deferred: nothing may be left undone to a gradient."""

    def unguard_all(self) -> None:
        """Let all parameters be read, also those that are guarded to find out when they are used."""

    def refuse(self, tracked: Tracked, why: str) -> None:
        """Have whatever reads the parameter or the state of its optimizer raise an error."""


class Updates(Generic[OneStep]):
    """The deferred updates of one session. Iteration yields their parameters.

    Args:
        turn: a reentrant lock, which nobody keeps while waiting.
        actions: see `Actions`.

    Attributes:
        in_backward: a backward pass runs whose gradients are summed.
    """

    def __init__(self, turn: AbstractContextManager[Any], actions: Actions[OneStep]) -> None:
        self._turn, self._do = turn, actions
        self._deferred: dict[Tracked, None] = {}  # in the order in which they were deferred
        self._hidden: list[Tracked] = []
        self._left: list[Tracked] = []  # were hidden from an optimizer that has raised; the script may have cleared them since
        self._steps_in: int | None = None  # the thread in which an optimizer runs from which gradients are hidden
        self.in_backward = False

    @property
    def hides(self) -> bool:
        """Whether gradients are hidden from an optimizer, which steps or has raised."""
        return self._steps_in is not None

    def __len__(self) -> int:
        return len(self._deferred)

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self._deferred)

    # -- a backward pass ----------------------------------------------------------------------------

    def begin(self, every: Iterable[Tracked], unread: Iterable[Tracked]) -> None:
        """A backward pass begins; no update is deferred any more.

        Args:
            every: the parameters of the session.
            unread: those whose updates were still deferred when the forward pass had ended.
        """
        early = set(unread)
        all_go_on(early, Event.BEGIN_UNREAD)
        all_go_on((tracked for tracked in every if tracked not in early) if early else every, Event.BEGIN)
        self.in_backward = True
        self._left.clear()

    def end(self, every: Iterable[Tracked]) -> None:
        """The backward pass is over. Every gradient has been sent, or is absent."""
        all_go_on(every, Event.END)
        self.in_backward = False

    # -- a step -------------------------------------------------------------------------------------

    def step(self, several: Sequence[Tracked], late: Sequence[Tracked], step: OneStep | None) -> None:
        """An optimizer is about to step.

        Args:
            several: the parameters that it has. None of their updates is deferred.
            late: those of them whose updates are deferred now.
            step: the call that defers them; None if there are none.
        """
        if step is not None:
            all_go_on(late, Event.DEFER)
            for tracked in late:
                tracked.step = step
                self._deferred[tracked] = None
            step.owes += len(late)
            self._do.hide(late)
            self._hidden += late
            self._steps_in = threading.get_ident()
            several = [tracked for tracked in several if tracked.step is None]
        all_go_on(several, Event.STEP)

    def stepped(self) -> None:
        """The optimizer has stepped: guard what it has not updated."""
        if self._steps_in is None:
            return
        self._do.show(self._hidden)
        self._do.guard(self._hidden)
        self._do.guard_state(self._hidden[0].step)
        self._hidden.clear()
        self._steps_in = None
        self._do.look_at_waits()

    def abandon(self) -> None:
        """An optimizer has raised in its `step()`: drop the updates that this call was to defer."""
        step = self._hidden[0].step
        for tracked in self._hidden:
            del self._deferred[tracked]
            tracked.step = None
        all_go_on(self._hidden, Event.ABANDON)
        self._left = self._hidden.copy()
        self._hidden.clear()
        self._steps_in = None
        self._do.has_raised(step)
        self._do.look_at_waits()

    def step_again(self) -> None:
        """An optimizer steps, perhaps behind one that has raised: put the gradients back that were hidden from that."""
        self._do.show(self._left)
        self._left.clear()

    def _until_step_is_over(self) -> None:
        stepping = self._steps_in
        if stepping is None:
            return
        if not self._do.is_stepping(stepping):
            self.abandon()
        elif stepping != threading.get_ident():
            self._do.wait_until(
                lambda: self._steps_in != stepping or not self._do.is_stepping(stepping),  # it may end by an exception
                "the optimizer, which steps in another thread",
            )

    # -- uses ---------------------------------------------------------------------------------------

    def use(self, tracked: Tracked, used: Callable[[], None]) -> None:
        """A guarded parameter is about to be used, by any thread: make its update.

        Args:
            tracked: the parameter.
            used: called once its value is that of the last step, by the thread that takes the guard off.
        """
        with self._turn, self._do.as_ordinary():
            self._until_step_is_over()
            if not self._do.is_guarded(tracked):
                return  # another thread has made it current
            self.make((tracked,))  # nothing to wait for if no step has deferred an update
            if tracked.phase is Phase.DEFERRED:
                return  # while this thread waited, others went on as far as the next step
            self._do.unguard((tracked,))
            used()

    def read(self, several: Sequence[Tracked], read: Callable[[], None]) -> None:
        """The gradients of some parameters are about to be read, by any thread: wait for the sums.

        Args:
            several: the parameters.
            read: called with the turn, once the sums are there.

        Raises:
            NotAllowedError: the sum may need gradients that the backward pass has yet to produce.
        """
        with self._turn, self._do.as_ordinary():
            all_go_on(several, Event.READ)
            self._until_step_is_over()
            if self._steps_in is None:  # else the optimizer reads a gradient as that of another parameter, too
                self.make(several)
            self._wait_for(several)
            read()

    def settle(self) -> None:
        """Wait for every sum of the last iteration and make every deferred update; nothing is guarded then."""
        with self._turn, self._do.as_ordinary():
            self._do.check()
            self._until_step_is_over()
            while not self.in_backward:
                self.make_all()
                self._do.wait_for_all()
                if not (self.in_backward or self._deferred):  # else another thread went on while this one waited
                    self._do.all_are_summed()
                    self._do.unguard_all()
                    return

    def make(self, several: Iterable[Tracked]) -> None:
        """Make those updates of `several` that are deferred, as by another optimizer's step."""
        for tracked in several:
            if tracked.phase is Phase.DEFERRED:
                self._make_current(tracked)

    def make_all(self) -> None:
        """Make all deferred updates."""
        while self._deferred:
            self._make_current(next(iter(self._deferred)))

    def give_up(self, every: Iterable[Tracked], why: str) -> None:
        """The session ends. Updates that a failed job has deferred will not be made.

        Args:
            every: the parameters of the session.
            why: what became of the job.
        """
        with self._turn:
            self._hidden.clear()
            self._left.clear()
            self._steps_in = None
            self._deferred.clear()
            self.in_backward = False
            for tracked in every:
                tracked.happens(Event.LOSE)
                if tracked.phase is Phase.LOST:
                    self._do.refuse(tracked, why)
            self._do.unguard_all()
            self._do.all_are_made()

    def _make_current(self, tracked: Tracked) -> None:
        """Wait for the sum of `tracked`, and make its deferred update, with all others whose sums have arrived."""
        self._do.from_elsewhere(self.make_all)
        awaited = tracked.step
        self._wait_for((tracked,))
        if awaited is None or tracked.step is not awaited:
            return  # another thread has made the update meanwhile
        batches: dict[int, tuple[OneStep, list[Tracked]]] = {}
        for other in self._do.arriving_with(tracked, list(self._deferred)):
            batches.setdefault(id(other.step), (other.step, []))[1].append(other)
        for step, several in batches.values():
            self._update(step, several)
        if not self._deferred:
            self._do.all_are_made()

    def _wait_for(self, several: Sequence[Tracked]) -> None:
        self._do.wait_for(several)
        self._until_step_is_over()  # an optimizer may have begun to step meanwhile, and hidden gradients

    def _update(self, step: OneStep, several: Sequence[Tracked]) -> None:
        self._do.update(step, several)
        for tracked in several:
            del self._deferred[tracked]
            tracked.step = None
        all_go_on(several, Event.UPDATE)
        self._do.unguard(several)  # last: other threads wait for it
        step.owes -= len(several)
        if not step.owes:
            self._do.unguard_state(step)
            step.ended()
