"""Stopwatch: how long the parts of an iteration take, where they are computed.

A device computes behind the host's back, so that the host's clock says when work was queued. Its own
clock says when it was done, and can be read once the device has come so far. Reports therefore wait
until `settle`, and measuring delays no kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from gradlane.live.backends.streams import Streams
from gradlane.live.comm.recorder import blocked, now_ns

Report = Callable[[int], None]
"""Called with a duration in ns."""


class Stopwatch(Protocol):
    """Measures durations between moments of the work that the script has queued."""

    def now(self) -> Any:
        """A moment: the work queued so far is done."""

    def report(self, report: Report, since: Any) -> None:
        """Tell `report` how long it takes from `since` to now, in the order of these calls."""

    def settle(self) -> None:
        """Wait until all that was asked for is told."""


class HostStopwatch:
    """On the CPU, where queued work is done. What the thread waits for sums in between, of any session, does not count."""

    def now(self) -> tuple[int, int, int]:
        return now_ns(), threading.get_ident(), blocked.total_ns

    def report(self, report: Report, since: tuple[int, int, int]) -> None:
        began_ns, thread, blocked_ns = since
        waited_ns = blocked.total_ns - blocked_ns if thread == threading.get_ident() else 0
        report(now_ns() - began_ns - waited_ns)

    def settle(self) -> None:
        """All is told."""


class DeviceStopwatch:
    """On a device.

    Args:
        streams: of the device.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._untold: list[tuple[Report, Any, Any]] = []

    def now(self) -> Any:
        return self._streams.mark()

    def report(self, report: Report, since: Any) -> None:
        self._untold.append((report, since, self._streams.mark()))

    def settle(self) -> None:
        if self._untold:
            self._streams.so_far().synchronize()  # the device is rarely so far: sleep once
        for report, since, until in self._untold:
            report(max(0, since.until_ns(until)))
        self._untold.clear()
