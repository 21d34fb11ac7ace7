"""Pressure: for how long this process's threads could have run and had no processor, as the kernel counts it."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

_THREADS = Path("/proc/self/task")
_LOOK_AGAIN = 64  # readings after which threads that have come since are found


class Pressure:
    """Counts from when it is made. A reading takes some 3 us a thread."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._waited_ns: dict[str, int] = {}
        self._readings = 0
        weakref.finalize(self, _close_all, self._files)
        self.part_of(1)

    def part_of(self, since_last_ns: int) -> float | None:
        """Of the time since it was last asked, all threads together; None where the kernel does not count."""
        if self._readings % _LOOK_AGAIN == 0:
            self._find()
        self._readings += 1
        waited_ns = 0
        for thread, file in list(self._files.items()):
            try:
                # time on a processor, time waiting for one, turns
                now_ns = int(os.pread(file, 100, 0).split()[1])
            except (OSError, ValueError, IndexError):
                self._drop(thread)  # it has ended
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
