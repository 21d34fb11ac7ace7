"""Pressure: whether this machine's processors have more to do than they can, as the kernel counts it."""

from __future__ import annotations

import contextlib
from pathlib import Path

_CPU = Path("/proc/pressure/cpu")


class Pressure:
    """For how long anything on this machine waited for a processor. Reading it takes some 10 us."""

    def __init__(self) -> None:
        self._before_us = _waited_us()

    def part_of(self, since_last_ns: int) -> float | None:
        """Of the time since it was last asked; None where the kernel does not count."""
        now_us, before_us = _waited_us(), self._before_us
        self._before_us = now_us
        if now_us is None or before_us is None or since_last_ns <= 0:
            return None
        return (now_us - before_us) * 1000 / since_last_ns


def _waited_us() -> int | None:
    # of the first line, `some avg10=... total=N`; kernels without it, and some containers, have no such file
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_CPU.read_text().split("\n", 1)[0].rsplit("total=", 1)[1])
    return None
