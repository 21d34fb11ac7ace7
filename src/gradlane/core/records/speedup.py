"""Speedup: how many times as fast as a baseline something was measured to be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, median_low

import msgspec

from gradlane.core.fields import need, need_int
from gradlane.units import format_ns

_STEADY = 1.25


class Speedup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many times as fast as a baseline, by the ratios of turns that both took side by side.

    Other work on a machine slows down both turns of a pair, or one pair of many. It changes the
    medians of all times, but hardly the median of the pairs' ratios.

    Attributes:
        ratio: the median ratio; of an even number of pairs the lower of the two in the middle.
        low, high: 25th and 75th percentile, each the next ratio outwards that was measured; below
            five pairs the lowest and the highest ratio.
        turns: the number of pairs.
    """

    ratio: float
    low: float
    high: float
    turns: int

    def __post_init__(self) -> None:
        need(0 < self.low <= self.ratio <= self.high < math.inf, "ratio", self.ratio, "a number from low to high, above 0")
        need_int("turns", self.turns, 1, 1_000_000)

    @classmethod
    def of(cls, baseline_ns: Sequence[float], own_ns: Sequence[float]) -> Speedup:
        """Compare turns that were taken side by side.

        Args:
            baseline_ns, own_ns: the time of each turn, more than 0, in the same order; turns
                without a partner at the end are ignored. Any unit, the same in both.

        Returns:
            The speedup of `own_ns` over `baseline_ns`.

        Raises:
            InputError: there is no pair of turns.
        """
        ratios = sorted(theirs / own for theirs, own in zip(baseline_ns, own_ns, strict=False))
        need(len(ratios) > 0, "turns", 0, "at least one of both")
        last = len(ratios) - 1
        return cls(median_low(ratios), ratios[math.floor(0.25 * last)], ratios[math.ceil(0.75 * last)], len(ratios))

    @property
    def spread(self) -> str:
        """`low` and `high`, for people."""
        return f"{self.low:.2f}..{self.high:.2f}"

    def __str__(self) -> str:
        return f"{self.ratio:.2f} times as fast ({self.spread} in {self.turns} turn{'s' if self.turns > 1 else ''})"


def turn_times(step_ns: Sequence[int], turns: int) -> list[float]:
    """The median step of each turn.

    Args:
        step_ns: steps in order, as many in each turn.
        turns: the number of turns.

    Raises:
        InputError: the steps are not as many in each turn.
    """
    steps, rest = divmod(len(step_ns), turns)
    need(steps > 0 and not rest, "step_ns: their number", len(step_ns), f"a multiple of {turns} turns")
    return [median(step_ns[at : at + steps]) for at in range(0, len(step_ns), steps)]


def disturbed(turns_ns: Sequence[float]) -> str | None:
    """What to say of turns of the same work that took different times.

    Returns:
        A clause with the times, or None if the longest took at most 1.25 times the shortest.
    """
    shortest, longest = min(turns_ns), max(turns_ns)
    if longest <= _STEADY * shortest:
        return None
    return f"disturbed: {len(turns_ns)} turns took {format_ns(round(shortest))} to {format_ns(round(longest))} a step"
