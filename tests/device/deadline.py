"""When a run on a device, which is lent for minutes, has to be over."""

from __future__ import annotations

import time
from collections.abc import Callable


class Deadline:
    """When a run is to be over.

    Args:
        limit_s: seconds from now.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end, self.limit_s = clock, clock() + limit_s, limit_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - self._clock())

    def limit_of(self, wanted_s: float) -> float:
        """Seconds that something may take which wants `wanted_s`."""
        return min(wanted_s, self.left_s)
