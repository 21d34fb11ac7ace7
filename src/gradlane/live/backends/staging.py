"""Staging: copies a device's messages to CPU memory and back, since gradlane's transport sends and
receives there.

One stream copies gradients down to the CPU and another copies sums up to the device: both
directions of the bus are used at once, and each stream waits only for what it copies, not for the
script's stream. A message is copied down as a whole, because the bus is much faster than the
network.

Owns one thread, which blocks until the next copy down has ended and then calls back. Nothing on the
host waits for copies up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from gradlane.live.backends.gradient_buffers import MessageBuffer
from gradlane.live.backends.streams import Event, Streams

Then = Callable[[BaseException | None], None]
"""Called once, on the thread of `Staging`, with None or with the error of the copy."""
_LEFT_S = 5.0  # for which `close` waits for a copy in flight


class Staging:
    """CPU memory for each message of a plan, and the copies between it and the device that has
    `streams`.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._down, self._up = streams.open(), streams.open()
        self._host: list[torch.Tensor] = []
        self._ends: dict[int, Event] = {}
        self._leaving: SimpleQueue[tuple[Event, Then] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gradlane-staging", daemon=True)
        self._thread.start()

    def prepare(self, buffers: Sequence[MessageBuffer]) -> list[torch.Tensor]:
        """Allocate and return CPU memory for each of `buffers`, in their order. No copy may be in
        flight.
        """
        self._host = [self._streams.host_memory(buffer.tensor) for buffer in buffers]
        self._ends.clear()
        return self._host

    def bring_down(self, message: int, buffer: MessageBuffer, ready: Sequence[Event], then: Then) -> None:
        """Copy `buffer` to the CPU memory of `message` once the events `ready` are over; then call
        `then`.
        """

        def work() -> None:
            buffer.gather()
            self._host[message].copy_(buffer.tensor, non_blocking=True)

        self._leaving.put((self._down.run(work, ready), then))

    def bring_up(self, message: int, buffer: MessageBuffer) -> None:
        """Copy the CPU memory of `message` back to `buffer`. Call `join` before using it."""

        def work() -> None:
            buffer.tensor.copy_(self._host[message], non_blocking=True)
            buffer.scatter()

        self._ends[message] = self._up.run(work)

    def join(self, message: int) -> None:
        """Make the script's stream wait until `message` is back on the device."""
        self._streams.join(self._ends[message])

    def has_ended(self, message: int) -> bool:
        """Whether `message` is back on the device, without waiting."""
        return message in self._ends and self._ends[message].query()

    def close(self) -> None:
        """End the thread, after at most 5 s."""
        self._leaving.put(None)
        self._thread.join(_LEFT_S)

    def _run(self) -> None:
        while (leaving := self._leaving.get()) is not None:
            event, then = leaving
            try:
                event.synchronize()
            except RuntimeError as error:
                then(error)
            else:
                then(None)
