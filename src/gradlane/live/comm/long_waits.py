"""Long waits: what is said of them, once a minute, while every rank answers and the job waits on.

Where ranks have met, each that waits reports so to rank 0, every `REPORT_S`. Whoever does not report is the one that the
others wait for: rank 0 names it in one line. Before that, in `attach`, a rank says itself what it waits for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger("gradlane")

SAY_S = 60.0  # between two lines
REPORT_S = 15.0  # between two reports of a rank that waits
_LATE_S = 5.0  # by which a report may be late


class Timer:
    """Tells when the next line or report is due, without a clock.

    Args:
        now: when the wait began, in seconds.
        every_s: seconds from one to the next.
    """

    def __init__(self, now: float, every_s: float) -> None:
        self._began, self._every_s = now, every_s
        self._next = now + every_s

    def due(self, now: float) -> float | None:
        """Seconds since the wait began if one is due, which it then is no more; else None."""
        if now < self._next:
            return None
        self._next = now + self._every_s
        return now - self._began

    def left_s(self, now: float) -> float:
        """Seconds until the next one is due."""
        return max(0.0, self._next - now)


@contextmanager
def saying(text: str) -> Iterator[None]:
    """While the block waits, log `text` and for how long it has waited, once a minute."""
    has_ended = threading.Event()

    def say() -> None:
        waited_s = 0.0
        while not has_ended.wait(SAY_S):
            waited_s += SAY_S
            log.warning("gradlane: %s, for %.0f s now", text, waited_s)

    thread = threading.Thread(target=say, name="gradlane-waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


@dataclass(frozen=True)
class _Report:
    at: float
    began: float
    what: str


class LongWaits:
    """What rank 0 knows of the ranks that wait, without a clock.

    Args:
        ranks: their numbers in the whole job, as the line names them.
        timeout_s: seconds for which a rank waits at most; for the line.
    """

    def __init__(self, ranks: Sequence[int], timeout_s: float) -> None:
        self._ranks, self._timeout_s = ranks, timeout_s
        self._reports: dict[int, _Report] = {}
        self._said_at = -SAY_S

    def report(self, rank: int, waited_s: float, what: str, now: float) -> None:
        """`rank` (its index in `ranks`) has waited for `what` for so long."""
        self._reports[rank] = _Report(now, now - waited_s, what)

    def line(self, now: float) -> str | None:
        """The line that is due now; None if none is."""
        waiting = {rank: each for rank, each in self._reports.items() if now - each.at <= REPORT_S + _LATE_S}
        self._reports = waiting
        if not waiting or now - self._said_at < SAY_S:
            return None
        first = min(waiting.values(), key=lambda each: each.began)
        waited_s = now - first.began
        if waited_s < SAY_S:
            return None
        self._said_at = now
        awaited = [each for rank, each in enumerate(self._ranks) if rank not in waiting]
        who = _named([self._ranks[rank] for rank in sorted(waiting)])
        have = "has" if len(waiting) == 1 else "have"
        whom = f" for {_named(awaited)}" if awaited else ""  # else for one another, or for a server
        return (
            f"{who} {have} waited{whom} for {waited_s:.0f} s ({first.what}); every rank answers, so the job waits on, for "
            f"up to {self._timeout_s:.0f} s (timeout=)"
        )


def _named(ranks: Sequence[int]) -> str:
    return "" if not ranks else f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
