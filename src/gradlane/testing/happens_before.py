"""Happens-before: vector clocks of timelines, and the accesses to memory that they do not order.

A timeline is whatever runs one thing after another: a stream of a device, or the host. Its clock says how far it knows each
timeline to be. Two accesses to the same bytes, at least one of them a write, are a race unless the clock at the later one
covers the earlier one. As in FastTrack (Flanagan and Freund, PLDI 2009), memory keeps its last writer and the readers since. If
there are races, the first is found, in whatever order the timelines ran.

No torch, no threads and no locks: `streams` brings them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType


class Timeline:
    """Things that run one after another.

    Args:
        name: for people.

    Attributes:
        clock: for each timeline how many of its steps are over for whatever comes next here; timelines
            that are not in it are not known at all.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: dict[Timeline, int] = {}

    def step(self) -> int:
        """Take a step, and return its number, from 1."""
        time = self.clock.get(self, 0) + 1
        self.clock[self] = time
        return time

    def wait_for(self, clock: Mapping[Timeline, int]) -> None:
        """What comes next here comes after all that `clock` covers."""
        own = self.clock
        for timeline, time in clock.items():
            if own.get(timeline, 0) < time:
                own[timeline] = time

    def now(self) -> dict[Timeline, int]:
        """A copy of the clock: an event that is over when all steps so far are."""
        return dict(self.clock)

    def __repr__(self) -> str:
        return self.name


Frames = tuple[tuple[CodeType, int], ...]
"""Where something was called, the innermost first: code and line."""


def place_of(frames: Frames) -> str:
    """The innermost file and line first, then whence that was called; "an unknown place" without frames."""
    places = [f"{'/'.join(code.co_filename.rsplit('/', 2)[-2:])}:{line}" for code, line in frames]
    return " < ".join(places) or "an unknown place"


@dataclass(frozen=True, eq=False)
class Access:
    """One operation's use of memory.

    Attributes:
        timeline: it runs on.
        time: its step there.
        operation: its name.
        frames: where it was called.
    """

    timeline: Timeline
    time: int
    operation: str
    frames: Frames = ()

    def is_before(self, clock: Mapping[Timeline, int]) -> bool:
        """Whether it is over for whoever has `clock`."""
        return clock.get(self.timeline, 0) >= self.time

    def __str__(self) -> str:
        return f"{self.operation} on {self.timeline.name}, at {place_of(self.frames)}"


@dataclass(frozen=True)
class Conflict:
    """An earlier access that nothing orders before a later one; they share bytes `begin` to `end`."""

    access: Access
    wrote: bool
    begin: int
    end: int


@dataclass
class _Piece:
    """Bytes with one history."""

    begin: int
    end: int
    writer: Access | None
    readers: dict[Timeline, Access]  # since, the last of each timeline


class Memory:
    """The history of one allocation, by ranges of bytes."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []  # in order, disjoint; bytes in none were not used
        self._begins: list[int] = []

    def read(self, begin: int, end: int, access: Access, clock: Mapping[Timeline, int]) -> list[Conflict]:
        """`access` reads bytes from `begin` up to, but not including, `end`.

        Args:
            clock: of its timeline, at its step.

        Returns:
            The writes that nothing orders before it.
        """
        first, last = self._cut(begin, end)
        found: list[Conflict] = []
        gaps: list[_Piece] = []
        at = begin
        for piece in self._pieces[first:last]:
            if piece.begin > at:
                gaps.append(_Piece(at, piece.begin, None, {access.timeline: access}))
            at = piece.end
            if piece.writer is not None and not piece.writer.is_before(clock):
                found.append(Conflict(piece.writer, True, piece.begin, piece.end))
            piece.readers[access.timeline] = access
        if at < end:
            gaps.append(_Piece(at, end, None, {access.timeline: access}))
        if gaps:
            self._put(first, last, sorted([*self._pieces[first:last], *gaps], key=lambda piece: piece.begin))
        return found

    def write(self, begin: int, end: int, access: Access, clock: Mapping[Timeline, int]) -> list[Conflict]:
        """`access` writes bytes from `begin` up to, but not including, `end`.

        Args:
            clock: of its timeline, at its step.

        Returns:
            The reads and writes that nothing orders before it.
        """
        first, last = self._cut(begin, end)
        found = [conflict for piece in self._pieces[first:last] for conflict in _not_before(piece, clock)]
        self._put(first, last, [_Piece(begin, end, access, {})])
        return found

    def free(self, clock: Mapping[Timeline, int]) -> list[Conflict]:
        """The reads and writes that are not over for whoever gets this memory next, at `clock`."""
        return [conflict for piece in self._pieces for conflict in _not_before(piece, clock)]

    def _cut(self, begin: int, end: int) -> tuple[int, int]:
        """Cut pieces at `begin` and `end`; return the first index between them and the one after the last."""
        if not self._pieces or begin >= self._pieces[-1].end:
            return len(self._pieces), len(self._pieces)
        first = self._cut_at(begin)
        return first, self._cut_at(end)

    def _cut_at(self, at: int) -> int:
        """The index of the first piece that begins at `at` or after it, once none goes across it."""
        index = bisect_right(self._begins, at)
        if index == 0:
            return 0
        piece = self._pieces[index - 1]
        if piece.begin == at:
            return index - 1
        if piece.end > at:
            self._pieces.insert(index, _Piece(at, piece.end, piece.writer, dict(piece.readers)))
            self._begins.insert(index, at)
            piece.end = at
        return index

    def _put(self, first: int, last: int, pieces: list[_Piece]) -> None:
        self._pieces[first:last] = pieces
        self._begins[first:last] = [piece.begin for piece in pieces]


def _not_before(piece: _Piece, clock: Mapping[Timeline, int]) -> Iterator[Conflict]:
    if piece.writer is not None and not piece.writer.is_before(clock):
        yield Conflict(piece.writer, True, piece.begin, piece.end)
    for reader in piece.readers.values():
        if not reader.is_before(clock):
            yield Conflict(reader, False, piece.begin, piece.end)
