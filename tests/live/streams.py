"""Streams without a device, which do what they are told as late, or as early, as real ones might.

A lazy stream does nothing until somebody waits for it: what is used without having been waited for is not there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from unittest.mock import patch

import torch

from gradlane.live.backends.streams import Event


class OnHost:
    """A stream that runs its work on whatever thread waits for it, or at once where it is `eager`."""

    def __init__(self, eager: bool) -> None:
        self._eager = eager
        self._lock = threading.RLock()
        self._queue: list[tuple[Callable[[], object], list[Event], End]] = []

    def run(self, work: Callable[[], object], after: Iterable[Event] = ()) -> Event:
        end = End(self)
        self._queue.append((work, list(after), end))
        if self._eager:
            self.run_up_to(end)
        return end

    def run_up_to(self, end: End) -> None:
        with self._lock:
            while not end.over:
                work, after, done = self._queue.pop(0)
                for event in after:
                    if not event.query():
                        event.synchronize()
                work()
                done.over = True


class End:
    def __init__(self, stream: OnHost | None) -> None:
        self._stream, self.over = stream, stream is None

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.run_up_to(self)


class _Reached(End):
    """Where the script's own stream is."""

    def __init__(self, waits: list[int]) -> None:
        super().__init__(None)
        self._waits = waits

    def synchronize(self) -> None:
        self._waits[0] += 1


class HostStreams:
    """What the script's own stream is given is done at once, as on any CPU. `waits[0]` is how often the host waited for it."""

    def __init__(self, eager: bool, orders: bool = False) -> None:
        self._eager, self._orders = eager, orders
        self._scripts = OnHost(eager=True)
        self.waits = [0]

    def open(self, urgent: bool = False) -> OnHost:
        return OnHost(self._eager)

    def scripts(self) -> OnHost:
        return self._scripts

    def orders(self, group: object) -> bool:
        return self._orders

    def so_far(self) -> Event:
        return _Reached(self.waits)

    def join(self, event: Event) -> None:
        event.synchronize()

    def host_memory(self, like: torch.Tensor) -> torch.Tensor:
        return torch.full(like.shape, torch.nan, dtype=like.dtype)


@contextlib.contextmanager
def streams_on_the_host(eager: bool, orders: bool = False) -> Iterator[HostStreams]:
    """Sessions attached inside take the CPU for a device with streams, in which collectives take their turn if `orders`."""
    streams = HostStreams(eager, orders)
    with patch("gradlane.live.startup.attach.streams_of", lambda device: streams):
        yield streams
