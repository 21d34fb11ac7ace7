"""The Dispatcher in native code, which the simulators and live sessions drive.

`gradlane.schedule.dispatcher` is its specification: both give the same answers to the same facts
(tests/contract/test_replay.py, tests/unit/test_dispatcher.py).
"""

from __future__ import annotations

from collections.abc import Callable

from gradlane._native import Dispatcher as Machine
from gradlane._native import Schedule
from gradlane.core.plan import Plan
from gradlane.schedule.dispatcher import describe_state


class NativeDispatcher:
    """Scheduling of one plan, iteration after iteration, as `Dispatcher`.

    Attributes:
        plan: what is carried out.
        ready, finished, allow: take a fact and return the messages to start now, as the
            specification's methods do.
        in_second_phase: whether a message is two-phase and its first half has finished.
        blocking: of each lane whose next message waits for room, the message in flight that started first.
    """

    ready: Callable[[int], list[int]]
    finished: Callable[[int], list[int]]
    allow: Callable[[int], list[int]]
    in_second_phase: Callable[[int], bool]
    blocking: Callable[[], list[int]]

    def __init__(self, plan: Plan, *, follow: bool = False) -> None:
        """Prepare for the first `begin`; the arguments are the specification's."""
        self.plan = plan
        self._machine = Machine(native_schedule(plan, follow=follow))
        # bound once: a method of this class would cost as much as the call
        self.ready = self._machine.ready
        self.finished = self._machine.finished
        self.allow = self._machine.allow
        self.in_second_phase = self._machine.is_in_second_phase
        self.blocking = self._machine.blocking

    def begin(self) -> None:
        """Begin a new iteration; the one before must have finished."""
        if not self._machine.begin():
            raise AssertionError(f"an iteration is still under way: {self.describe_state()}")

    @property
    def done(self) -> bool:
        """Whether every message of this iteration has finished."""
        return self._machine.done()

    @property
    def in_flight(self) -> frozenset[int]:
        """The messages that were started and have not finished."""
        return frozenset(self._machine.state()[1])

    def describe_state(self) -> str:
        """The messages in flight and the gradients that are missing, as text for error messages."""
        return describe_state(self.plan, *self._machine.state())


def native_schedule(plan: Plan, *, follow: bool = False) -> Schedule:
    """What of `plan` decides when messages start, for native code."""
    held = [() if message.hold_until is None else (message.hold_until,) for message in plan.messages]
    return Schedule(
        tensors=len(plan.tensors),
        messages=[
            (message.size_bytes, message.priority, message.lane, message.two_phase, sorted({*message.tensors, *more}))
            for message, more in zip(plan.messages, held, strict=True)
        ],
        windows=[lane.window_bytes for lane in plan.lanes],
        sequence=None if plan.sequence is None else list(plan.sequence),
        second_phases=list(plan.late_second_phases),
        follow=follow,
    )
