"""Rounds: a session's iterations, joined from one optimizer step to the next.

A model may run several backward passes that sum, in each step of its optimizer. The critic of a GAN runs one for its own loss
and one for the generator's. Such passes take different times, so that only whole rounds can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass

_MOST_PASSES = 16  # gradients may be accumulated for longer; the passes are alike then


@dataclass(frozen=True)
class Round:
    """One round.

    Attributes:
        took_ns: its length.
        blocked_ns: the part of it in which the training thread was blocked for sums, of any session.
        passes: backward passes in it.
    """

    took_ns: int
    blocked_ns: int = 0
    passes: int = 1


class Rounds:
    """Joins iterations to rounds. A script whose optimizer was never seen to step has one iteration a round."""

    def __init__(self) -> None:
        self._steps = False
        self._open = Round(0, 0, 0)

    def observe(self, took_ns: int, blocked_ns: int, stepped: bool) -> Round | None:
        """Take in an iteration that has ended.

        Args:
            took_ns: its length.
            blocked_ns: for how long the training thread was blocked for sums in it.
            stepped: whether the optimizer stepped in it.

        Returns:
            The round that has ended with it; None if it goes on.
        """
        self._steps = self._steps or stepped
        joined = Round(self._open.took_ns + took_ns, self._open.blocked_ns + blocked_ns, self._open.passes + 1)
        goes_on = self._steps and not stepped and joined.passes < _MOST_PASSES
        self._open = joined if goes_on else Round(0, 0, 0)
        return None if goes_on else joined
