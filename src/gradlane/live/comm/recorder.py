"""Recorder: the times of what happens in a session.

An event costs one tuple, and the last `KEEP` iterations are kept. Times are nanoseconds of the
monotonic clock, which ranks on one host share. Any thread may add a span: an append is atomic.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from gradlane.core.timeline import Kind, Span, Timeline

KEEP = 64  # iterations

Row = tuple[Kind, int, int, int, int]
"""A span: kind, iteration, subject (a tensor or message; -1 for none), start and end in ns."""

_Rows = tuple[Kind, int, Sequence[int], int, int]
"""A span of each of several subjects, which differ in nothing else."""

now_ns = time.monotonic_ns


class Waited(threading.local):
    """`total_ns`: for how long the calling thread has waited so far."""

    total_ns = 0


blocked = Waited()
"""For sums, of all sessions."""


class Recorder:
    """Spans of the last iterations of one session."""

    def __init__(self) -> None:
        self._elsewhere: Callable[[bool], list[Row]] = lambda last: []
        self._iterations: deque[list[_Rows]] = deque(maxlen=KEEP)
        self._spans: list[_Rows] = []

    def begin(self) -> None:
        """Begin a new iteration: the spans that follow are kept with it."""
        self._spans = []
        self._iterations.append(self._spans)

    def add(self, kind: Kind, iteration: int, subject: int, start_ns: int, end_ns: int) -> None:
        """Add a span; its fields are those of `Row`."""
        self._spans.append((kind, iteration, (subject,), start_ns, end_ns))

    def add_each(self, kind: Kind, iteration: int, subjects: Sequence[int], start_ns: int, end_ns: int) -> None:
        """Add the same span for each of `subjects`, at the price of one."""
        self._spans.append((kind, iteration, subjects, start_ns, end_ns))

    def note_elsewhere(self, rows: Callable[[bool], list[Row]]) -> None:
        """More spans are kept by somebody else: `rows` gives those of the last iteration (True) or of all."""
        self._elsewhere = rows

    def last(self) -> list[Row]:
        """The spans since the last `begin`, which is at the start of a backward pass."""
        return [*_each(self._spans), *self._elsewhere(True)]

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has stepped since the last `begin`."""
        return any(kind == "update" for kind, *_ in reversed(self._spans))

    def forget(self, iteration: int) -> None:
        """Drop all spans, since the plan changed before `iteration` and a timeline is of one plan.

        The first span after that is a `switch`, which marks the change.
        """
        now = now_ns()
        self._spans = [("switch", iteration, (-1,), now, now)]
        self._iterations.clear()
        self._iterations.append(self._spans)

    def timeline(self, plan: str, rank: int) -> Timeline:
        """Make a timeline of the kept iterations.

        Args:
            plan: fingerprint of the plan that they ran under.
            rank: of this process.
        """
        rows = [row for rows in list(self._iterations) for row in _each(rows) if row[1] >= 0]
        spans = [Span(*row) for row in (*rows, *self._elsewhere(False))]
        return Timeline(plan, rank, tuple(sorted(spans, key=lambda span: span.start_ns)))


def _each(spans: Sequence[_Rows]) -> list[Row]:
    # of a copy: another thread may add one
    return [(kind, iteration, one, start, end) for kind, iteration, many, start, end in list(spans) for one in many]
