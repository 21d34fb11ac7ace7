"""Groups: process groups of torch.distributed that a session makes for itself, and how they end.

After a failure sums are stuck in them: they wait for ranks that will not come. torch.distributed tells of their end on threads
of its own, and a process whose interpreter is finalised just when such a thread calls Python is aborted (SIGABRT, in place of
the script's exit code). So whatever is stuck when the process ends is ended before: its connections are shut down.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradlane.live.backends.sockets import Sockets, ends_of, open_sockets

_END_S = 5.0  # how long what was cut off may take to end: longer means that something else keeps it


class ProcessGroups:
    """Groups over the ranks of `group`, in the order in which they were opened."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        self._ranks = None if group is None else dist.get_process_group_ranks(group)
        self._timeout = timedelta(seconds=timeout_s)
        self._all: list[Any] = []
        self._sockets: list[Sockets] = []
        self._changed = threading.Condition()
        self._under_way = 0

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Any:
        return self._all[index]

    def open(self) -> None:
        """One more; every rank calls it."""
        if not self._all:
            atexit.register(self._end)
        before = open_sockets()
        self._all.append(dist.new_group(self._ranks, timeout=self._timeout))
        self._sockets.append(open_sockets() - before)

    def sockets(self, index: int) -> Sockets:
        """Those among which the connections of a group are: opened while it was made."""
        return self._sockets[index]

    def when_ended(self, works: Sequence[Any], tell: Callable[[BaseException | None], None]) -> None:
        """Have `tell` called, on a thread of torch.distributed, once all `works` on the CPU have ended, with what failed."""

        def ended(future: Any) -> None:
            try:
                try:
                    future.wait()
                except Exception as error:
                    tell(error)
                else:
                    tell(None)
            finally:
                with self._changed:
                    self._under_way -= 1
                    self._changed.notify_all()

        with self._changed:
            self._under_way += 1
        futures = [work.get_future() for work in works]
        (futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)).add_done_callback(ended)

    def close(self) -> None:
        """Give the groups back; nothing may be under way."""
        atexit.unregister(self._end)
        for group in self._all:
            # at exit the script may have destroyed them all already
            with contextlib.suppress(ValueError, AssertionError):
                dist.destroy_process_group(group)
        self._all.clear()

    def _end(self) -> None:
        """At exit, if nobody has closed them."""
        if not self._under_way:
            return
        for fd, _ in set().union(*self._sockets) & open_sockets():
            if ends_of(fd) is not None:  # Gloo aborts the process where its listener is shut
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
                    one.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _END_S
        with self._changed:
            while self._under_way and time.monotonic() < deadline:
                self._changed.wait(deadline - time.monotonic())
        if not self._under_way:
            self.close()  # and with it the threads that told
