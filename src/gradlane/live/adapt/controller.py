"""Plan controllers: what may replace the plan while a session trains, on all ranks at the same
iteration boundary.

At the start of a backward pass rank 0 sends its decision over the control channel and every other
rank blocks until it arrives. A rank that waits loses nothing: its sums need rank 0's gradients in
any case. While nothing is tried, rank 0 also sends the number of iterations after which the next
decision comes, so that most iterations have no wait.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Protocol

from gradlane.core.plan import Plan
from gradlane.core.records.search_log import SearchLog
from gradlane.core.records.tuned import Tuned
from gradlane.live.adapt.profiling import Planner
from gradlane.live.backends.base import Backend
from gradlane.live.comm.driver import Driver
from gradlane.live.comm.recorder import Recorder


class PlanController(Protocol):
    """Decides between two iterations whether the plan changes.

    Owned by a session, which calls it on the training thread.
    """

    @property
    def over(self) -> bool:
        """Whether the plan is final. The same on all ranks."""

    @property
    def settled(self) -> bool:
        """Whether no plan is being tried. The same on all ranks."""

    def start(self, planner: Planner, recorder: Recorder) -> None:
        """The session calls this once, when its first plan has come into force."""

    def decide(self, planner: Planner, driver: Driver, backend: Backend) -> Plan | None:
        """Agree with the other ranks on the plan of the next iteration. Every rank calls it between
        two iterations.

        Returns:
            The plan to take up, or None to keep the one in force.
        """

    def record(self) -> Tuned | SearchLog | None:
        """What rank 0 has tried and found so far; None on other ranks."""

    def close(self) -> None:
        """The session ends."""


class ControlDecision(IntFlag):
    """What rank 0 decides for the next iteration."""

    STAY = 0
    CHANGE = 1
    """A new plan follows, broadcast by rank 0."""
    SETTLED = 2
    """No plan is being tried from now on."""


# a decision on the wire: its flags in the low byte, above them the iterations until the next one
_QUIET_SHIFT = 8
_DECISION_EVERY_NS, _MOST_QUIET_ITERATIONS = 250_000_000, 64  # while nothing is tried


def quiet_iterations(iteration_ns: int) -> int:
    """Iterations of `iteration_ns` until the next decision while nothing is tried: about 250 ms, 1
    to 64 iterations.
    """
    return min(_MOST_QUIET_ITERATIONS, max(1, _DECISION_EVERY_NS // max(1, iteration_ns)))


class ControlDecisions:
    """Carries rank 0's decisions to the other ranks of one session and keeps track of when the next
    one is due.
    """

    def __init__(self) -> None:
        self._next = 0

    def is_due(self, driver: Driver) -> bool:
        """Whether rank 0 sends a decision before the next iteration. The same on all ranks."""
        return driver.iteration + 1 >= self._next

    def announce(self, driver: Driver, decision: ControlDecision | None, quiet: int = 1) -> ControlDecision:
        """Send rank 0's decision, or receive it. Every rank calls it when `is_due`.

        Args:
            decision: rank 0's; None on other ranks, which block until it arrives.
            quiet: rank 0's number of iterations until the next decision, 1 or more; ignored on
                other ranks.

        Returns:
            Rank 0's decision, on every rank.

        Raises:
            JobError: the job failed while this rank waited.
        """
        sent = driver.decide(None if decision is None else decision | quiet << _QUIET_SHIFT)
        self._next = driver.iteration + 1 + (sent >> _QUIET_SHIFT)
        return ControlDecision(sent & ((1 << _QUIET_SHIFT) - 1))
