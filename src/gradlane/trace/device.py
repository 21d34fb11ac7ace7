"""What a device did for the parts of a step: busy time, and the idle time that launches explain.

A kernel belongs to the part in whose time on the host it was launched. The device is idle before a kernel if all work launched
earlier has ended. Of such a gap a part counts what its own launches explain: the host prepares the launch, and the launch takes
effect (`LATENCY_US` at most). Three things do not count: idle time before the part begins on the host, pauses, and a launched
kernel's wait for something else, such as a collective. In a pause no thread that launches work is in an operation (`PAUSE_US`):
the script awaits inputs or logs. All times are in us on the trace's clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

PAUSE_US = 1_000.0
"""A host that is in no operation for longer than this does not prepare a launch: between two operations Python takes some
tens of us."""
LATENCY_US = 50.0
"""A launch takes effect within 5 to 20 us on an idle device, and work that was launched follows the work before it within 3 us.
What waits longer waits for something else."""


class Work(NamedTuple):
    """One kernel, copy or fill on the device, and when the host launched it."""

    launched_us: float
    started_us: float
    ended_us: float


class Intervals:
    """Times that lie apart from each other, in order: how much of them an interval has."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        """Merge `intervals`, of start and end, in any order."""
        self._starts: list[float] = []
        self._ends: list[float] = []
        for start, end in sorted(intervals):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)
        self._before = [0.0, *accumulate(end - start for start, end in self)]

    def __iter__(self) -> Iterator[tuple[float, float]]:
        """Start and end of each."""
        return zip(self._starts, self._ends, strict=True)

    def gaps(self, longer_than: float) -> Intervals:
        """The times between them that are longer than `longer_than`."""
        between = zip(self._ends, self._starts[1:], strict=False)
        return Intervals((end, start) for end, start in between if start - end > longer_than)

    def outside(self, start: float, end: float) -> Iterator[tuple[float, float]]:
        """Start and end of each part of the time from `start` to `end` that they do not cover."""
        place = max(0, bisect_right(self._starts, start) - 1)
        for begun, ended in zip(self._starts[place:], self._ends[place:], strict=True):
            if begun >= end:
                break
            if begun > start:
                yield start, begun
            start = max(start, ended)
        if start < end:
            yield start, end

    def within(self, start: float, end: float) -> float:
        """How much of the time from `start` to `end` they cover; 0 where it ends before it starts."""
        return max(0.0, self._until(end) - self._until(start)) if start < end else 0.0

    def _until(self, at: float) -> float:
        place = bisect_right(self._starts, at)
        return self._before[place] - max(0.0, self._ends[place - 1] - at) if place else 0.0


class Part(NamedTuple):
    """A part of a step, as far as work was launched in it.

    Attributes:
        first, stop: indices of its work.
        began_us: when it began on the device: its first launch could run, or its first work ran.
        unexplained_us: of the gap from then until its first work, what counts for no part.
    """

    first: int
    stop: int
    began_us: float
    unexplained_us: float


class DeviceClock:
    """The work of a device in the order of its launch, and how much time passes for a part of a step."""

    def __init__(self, work: Iterable[Work], collectives: Intervals, host: Intervals) -> None:
        """Prepare.

        Args:
            work: all work but collectives.
            collectives: when collectives ran on the device.
            host: when threads that launch work were in an operation or a call of the runtime.
        """
        in_order = sorted(work)
        self._launched = [each.launched_us for each in in_order]
        self._started = [each.started_us for each in in_order]
        self._ended = list(accumulate((each.ended_us for each in in_order), max))  # and no earlier than any launched before
        self._collectives, self._pauses = collectives, host.gaps(PAUSE_US)
        gaps = [(0.0, 0.0), *(self._gap(index, free) for index, free in enumerate(self._ended[:-1], 1))]
        self._unexplained = list(accumulate(unexplained for unexplained, _ in gaps))
        self._waited = list(accumulate(waited for _, waited in gaps))

    def __bool__(self) -> bool:
        """Whether there was any work."""
        return bool(self._launched)

    def part(self, since_us: float, until_us: float) -> Part | None:
        """The part that lasts from `since_us` to `until_us` on the host; None if it launched nothing."""
        first, stop = bisect_left(self._launched, since_us), bisect_left(self._launched, until_us)
        if first == stop:
            return None
        free = max(since_us, self._ended[first - 1]) if first else since_us
        began = min(free, self._started[first])
        return Part(first, stop, began, self._gap(first, began)[0])

    def took_us(self, part: Part, until_us: float = math.inf) -> float:
        """How long `part` took, as far as it was launched before `until_us` on the host."""
        stop = min(part.stop, bisect_left(self._launched, until_us))
        return self._passed(part, stop - 1, self._ended) if stop > part.first else 0.0

    def offset_us(self, part: Part, launched_us: float) -> float:
        """How long after the beginning of `part` its first work launched at `launched_us` or later starts."""
        place = bisect_left(self._launched, launched_us)
        if place <= part.first:
            return 0.0
        return self._passed(part, place, self._started) if place < part.stop else self.took_us(part)

    def waited_us(self, since: Part, until: Part) -> float:
        """How long the device waited for collectives from the beginning of `since` to that of `until`."""
        return self._waited[until.first - 1] - self._waited[since.first] + self._gap(since.first, since.began_us)[1]

    def _passed(self, part: Part, index: int, at: Sequence[float]) -> float:
        unexplained = part.unexplained_us + self._unexplained[index] - self._unexplained[part.first]
        return max(0.0, at[index] - part.began_us - unexplained)

    def _gap(self, index: int, since_us: float) -> tuple[float, float]:
        """Of the gap from `since_us` to the work of `index`, what no launch explains, and what of that collectives took."""
        launched, started = self._launched[index], self._started[index]
        held_back = started - max(since_us, launched) - LATENCY_US
        paused = self._pauses.within(since_us, min(launched, started))
        if held_back <= 0:
            return paused, 0.0
        return paused + held_back, min(held_back, self._collectives.within(max(since_us, launched), started))
