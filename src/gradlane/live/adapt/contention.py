"""CPU contention: how long this process's threads were runnable and had to wait for a processor
(Linux schedstat).
"""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

_THREADS = Path("/proc/self/task")
_FIND_EVERY = 64  # readings between two searches for new threads


class Pressure:
    """Measures this process's waiting for processors since the last reading; a reading takes about
    3 us per thread.
    """

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._waited_ns: dict[str, int] = {}
        self._readings = 0
        weakref.finalize(self, _close_all, self._files)
        self.part_of(1)

    def part_of(self, since_last_ns: int) -> float | None:
        """Time that threads waited for a processor since the last call, as a part of the time that
        has passed.

        Args:
            since_last_ns: nanoseconds since the last call.

        Returns:
            The waiting time of all threads over `since_last_ns`, so that it can exceed 1; None
            where the kernel has no schedstat.
        """
        if self._readings % _FIND_EVERY == 0:
            self._find()
        self._readings += 1
        waited_ns = 0
        for thread, file in list(self._files.items()):
            try:
                # of three numbers: ns on a processor, ns waiting for one, time slices
                now_ns = int(os.pread(file, 100, 0).split()[1])
            except (OSError, ValueError, IndexError):
                self._drop(thread)  # the thread has ended
                continue
            waited_ns += now_ns - self._waited_ns.get(thread, now_ns)
            self._waited_ns[thread] = now_ns
        return waited_ns / since_last_ns if self._files and since_last_ns > 0 else None

    def _find(self) -> None:
        with contextlib.suppress(OSError):
            for thread in os.listdir(_THREADS):
                if thread not in self._files:
                    with contextlib.suppress(OSError):
                        self._files[thread] = os.open(_THREADS / thread / "schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def _drop(self, thread: str) -> None:
        os.close(self._files.pop(thread))
        self._waited_ns.pop(thread, None)


def _close_all(files: dict[str, int]) -> None:
    for file in files.values():
        os.close(file)
    files.clear()
