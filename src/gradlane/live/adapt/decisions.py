"""Decisions: what rank 0 decides between two iterations, and when the next decision is due.

At the start of a backward pass rank 0 sends its decision over the control channel and every other
rank blocks until it arrives. A rank that waits loses nothing: its sums need rank 0's gradients in
any case. While nothing is tried, rank 0 also sends the number of iterations after which the next
decision comes, so that most iterations have no wait.
"""

from __future__ import annotations

from enum import IntFlag
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that decisions can be simulated without torch
    from gradlane.live.comm.driver import Driver


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
