"""Stragglers: which rank makes the others wait, and for how long of each step.

A step of a rank is from the start of one backward pass that sums to that of the next. What its
training thread does not spend waiting for other ranks, it is busy: with the passes, the optimizer,
its data, a checkpoint. Each step ends together on all ranks, so the one that is busy longest sets
the pace. Steps are compared one by one, and what slows all ranks alike names nobody.

Ranks report every `WINDOW` steps, and rank 0 judges. On a device the host does not wait for sums,
so its busy time says nothing, and nobody reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

WINDOW = 5  # steps of one report
# A rank is named after 5 steps and 2 s if it was busy for twice as long as the others in every step. It
# is also named if it took a quarter longer in four steps of five, for 20 steps and 10 s. On a
# machine that others use, a process has no processor for a second now and then. Times that vary by 30 %
# on each rank by itself are no straggler (tests/live/test_stragglers.py).
_CLEARLY, _SLIGHTLY = 1 / 2, 1 / 5  # of the rank's busy time, by which it exceeds the others'
_CLEAR_AFTER_US, _SLIGHT_AFTER_US, _SLIGHT_AFTER_WINDOWS = 2_000_000, 10_000_000, 4
_LEAST_US = 1_000  # of a step, below which nothing is said
_AGAIN = 20  # windows in which a named rank keeps up until it may be named again
_OPEN = 4  # windows that may be waiting for reports; ranks are at most a step or two apart


class BusyTimes:
    """The steps of this rank.

    Args:
        report: called every `WINDOW` steps with the number of the window, from 0, and the
            microseconds for which this rank was busy in each of its steps.
    """

    def __init__(self, report: Callable[[int, Sequence[int]], None]) -> None:
        self._report = report
        self._times: list[int] = []
        self._windows = 0
        self._began: tuple[int, int] | None = None

    def step(self, now_ns: int, waited_ns: int) -> None:
        """A backward pass that sums begins.

        Args:
            now_ns: the time.
            waited_ns: for which this thread has waited for other ranks in all.
        """
        if self._began is not None:
            began_ns, waited_before_ns = self._began
            busy_us = (now_ns - began_ns - (waited_ns - waited_before_ns)) // 1000
            self._times.append(min(max(busy_us, 0), 2**32 - 1))
            if len(self._times) == WINDOW:
                self._report(self._windows, self._times)
                self._windows += 1
                self._times = []
        self._began = now_ns, waited_ns


@dataclass(frozen=True)
class Straggler:
    """A rank that slows the job.

    Args:
        rank: which.
        busy_us, others_us: microseconds of one step for which it and the other ranks are busy, medians
            of the last `WINDOW` steps.
        steps: for how many it has been slower.
    """

    rank: int
    busy_us: int
    others_us: int
    steps: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank} slows the job, for {self.steps} steps now: in the last {WINDOW} it was busy for "
            f"{self.busy_us / 1000:.1f} ms a step and the other ranks for {self.others_us / 1000:.1f} ms (medians), so that "
            f"they wait for it for up to {(self.busy_us - self.others_us) / 1000:.1f} ms a step; is its processor slower or "
            "shared, or does it load data or write files that others do not?"
        )


@dataclass(frozen=True)
class Slowest:
    """The rank that was busy for longest, of all ranks.

    Args:
        rank: which.
        busy_us: microseconds of a step, the median of `WINDOW` steps.
    """

    rank: int
    busy_us: int


class _Streak:
    """Windows in a row in which a rank was slow, and for how long it was busy in them."""

    def __init__(self) -> None:
        self.windows = self.busy_us = 0

    def goes_on(self, busy_us: Sequence[int], is_slow: bool) -> None:
        self.windows = self.windows + 1 if is_slow else 0
        self.busy_us = self.busy_us + sum(busy_us) if is_slow else 0


class Stragglers:
    """Rank 0's judgement.

    Args:
        ranks: numbers of the ranks in the whole job, by which they are named.

    Attributes:
        slowest: in the last window that all ranks have reported; None before the first, and for a rank alone.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self.slowest: Slowest | None = None
        self._reports: dict[int, dict[int, Sequence[int]]] = {}  # window -> rank -> times
        self._clear = [_Streak() for _ in ranks]
        self._slight = [_Streak() for _ in ranks]
        self._kept_up = [_AGAIN] * len(ranks)  # windows in a row in which it was not

    def report(self, rank: int, window: int, busy_us: Sequence[int]) -> list[Straggler]:
        """Take one rank's report, and return who is to be named now.

        Args:
            rank: whose report it is, from 0.
            window: its number.
            busy_us: as `BusyTimes` reports it, `WINDOW` times.
        """
        if len(self._ranks) == 1:  # which makes nobody wait
            return []
        reports = self._reports.setdefault(window, {})
        reports[rank] = busy_us
        if len(reports) < len(self._ranks):
            if len(self._reports) > _OPEN:
                del self._reports[min(self._reports)]
            return []
        del self._reports[window]
        self.slowest = max(
            (Slowest(self._ranks[one], round(median(times))) for one, times in reports.items()),
            key=lambda each: each.busy_us,
        )
        found = [self._judge(one, reports) for one in range(len(self._ranks))]
        return [straggler for straggler in found if straggler is not None]

    def _judge(self, rank: int, reports: dict[int, Sequence[int]]) -> Straggler | None:
        own = reports[rank]
        others = [median(step) for step in zip(*(times for one, times in reports.items() if one != rank), strict=True)]
        excesses = [mine - theirs for mine, theirs in zip(own, others, strict=True)]
        busy, excess = median(own), median(excesses)
        shares = sorted(more / max(mine, 1) for more, mine in zip(excesses, own, strict=True))
        is_slight = excess >= _LEAST_US and shares[1] >= _SLIGHTLY
        clear, slight = self._clear[rank], self._slight[rank]
        clear.goes_on(own, is_slight and shares[0] >= _CLEARLY)
        slight.goes_on(own, is_slight)
        if not is_slight:
            self._kept_up[rank] += 1
        elif clear.busy_us >= _CLEAR_AFTER_US or (
            slight.busy_us >= _SLIGHT_AFTER_US and slight.windows >= _SLIGHT_AFTER_WINDOWS
        ):
            is_new = self._kept_up[rank] >= _AGAIN
            self._kept_up[rank] = 0
            if is_new:
                return Straggler(self._ranks[rank], round(busy), round(busy - excess), slight.windows * WINDOW)
        return None
