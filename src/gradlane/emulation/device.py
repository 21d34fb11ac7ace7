"""Device: an accelerator emulated by a clock. Work takes the time asked for and no processor.

It behaves like a GPU stream for the thread that feeds it. Work starts when the work before it has
ended or, if the thread had to wait for something (a sum from the network), when the thread comes,
whichever is later. What the thread computes in between (hooks, optimizers) does not delay the device, as a host runs
ahead of its device. Work that needs a sum does not start before the sum is there. A wait of more than 2 ms counts as
begun after what the thread computed ahead of it. The schedule is absolute, so late wake-ups do not add up.

Owned by one `Emulated`; used by whichever thread runs its passes, one at a time.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from typing import Protocol

_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1_000  # the default of 50 us is the largest part of how late a sleeper wakes on an idle machine
# a pass that ends later than this means that the thread could not keep up with the device; shorter waits are for locks
_NOISE_NS = 2_000_000


class Clock(Protocol):
    """Time as the calling thread sees it, in nanoseconds."""

    def now_ns(self) -> int: ...

    def busy_ns(self) -> int:
        """How long this thread has run or waited for a processor; otherwise it was blocked."""

    def sleep_until(self, due_ns: int) -> None: ...


class _Delays:
    """How long this thread was ready while others ran, in ns; 0 if the kernel does not count it."""

    def __init__(self) -> None:
        try:
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def so_far_ns(self) -> int:
        return 0 if self._fd < 0 else int(os.pread(self._fd, 100, 0).split()[1])


class ThreadClock:
    """The real clock."""

    def __init__(self) -> None:
        self._own = threading.local()

    def __reduce__(self) -> tuple[type[ThreadClock], tuple[()]]:
        return ThreadClock, ()  # a copied model gets its own clock

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def busy_ns(self) -> int:
        return time.thread_time_ns() + self._delays().so_far_ns()

    def sleep_until(self, due_ns: int) -> None:
        left = due_ns - time.monotonic_ns()
        if left > 0:
            time.sleep(left * 1e-9)

    def _delays(self) -> _Delays:
        delays: _Delays | None = getattr(self._own, "delays", None)
        if delays is None:
            delays = self._own.delays = _Delays()
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_TIMER_SLACK_NS), 0, 0, 0)
        return delays


class Device:
    """Delays the calling thread until emulated work would have ended."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or ThreadClock()
        self._thread = 0
        self._due_ns = 0
        self._seen_ns = self._seen_busy_ns = 0

    def begin_pass(self) -> None:
        """Begin a forward pass: what the script did since the last pass precedes whatever this one waits for."""
        self._due_ns = self._start_ns()
        self._mark_time()

    def run(self, work_ns: int) -> None:
        """Work for `work_ns`, after earlier work and after whatever the thread has just waited for."""
        self._due_ns = self._start_ns() + work_ns
        self._clock.sleep_until(self._due_ns)
        self._mark_time()

    def end_pass(self) -> None:
        """End a forward or backward pass; lateness that it could not make up is not carried over."""
        if self._seen_ns - self._due_ns > _NOISE_NS:
            self._due_ns = self._seen_ns

    def _start_ns(self) -> int:
        """When work can start: after earlier work, and after waits of the thread since its last call, other than for a
        processor.
        """
        now, busy = self._clock.now_ns(), self._clock.busy_ns()
        if self._thread != threading.get_ident():
            # another thread's times do not compare with the last one's, so start again
            self._thread = threading.get_ident()
            return max(self._due_ns, now)
        blocked = max(0, (now - self._seen_ns) - (busy - self._seen_busy_ns))
        # which of the time since was the wait is not known; it ended after as long as it lasted, or later
        return (max(self._due_ns, self._seen_ns) if blocked > _NOISE_NS else self._due_ns) + blocked

    def _mark_time(self) -> None:
        self._seen_ns, self._seen_busy_ns = self._clock.now_ns(), self._clock.busy_ns()
