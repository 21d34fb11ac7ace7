"""Staging: messages of a device on their way through CPU memory, where the own transport sends from and receives into.

One stream brings gradients down and another brings sums up, so that both ways of the bus are in use at once and neither
waits for the script's own stream longer than what it needs from it. A message goes down as a whole: at the speeds of a bus
that is a small part of its time on a network.

Owns one thread, which sleeps until the next copy down is over and says so; copies up are for the device alone to wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from gradlane.live.backends.gradient_buffers import MessageBuffer
from gradlane.live.backends.streams import Event, Streams

Then = Callable[[BaseException | None], None]
"""Called once, on the thread of the staging, with None or with why the copy failed."""
_LEFT_S = 5.0  # how long a copy that is under way may keep `close`


class Staging:
    """CPU memory for each message of a plan, and the copies between it and the device."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._down, self._up = streams.open(), streams.open()
        self._host: list[torch.Tensor] = []
        self._ends: dict[int, Event] = {}
        self._leaving: SimpleQueue[tuple[Event, Then] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gradlane-staging", daemon=True)
        self._thread.start()

    def prepare(self, buffers: Sequence[MessageBuffer]) -> list[torch.Tensor]:
        """CPU memory for messages in `buffers`, in their order. Nothing may be under way."""
        self._host = [self._streams.host_memory(buffer.tensor) for buffer in buffers]
        self._ends.clear()
        return self._host

    def bring_down(self, message: int, buffer: MessageBuffer, ready: Sequence[Event], then: Then) -> None:
        """Copy `buffer` into the memory of `message` once `ready` are over; then call `then`."""

        def work() -> None:
            buffer.gather()
            self._host[message].copy_(buffer.tensor, non_blocking=True)

        self._leaving.put((self._down.run(work, ready), then))

    def bring_up(self, message: int, buffer: MessageBuffer) -> None:
        """Copy the memory of `message` back; who uses it has to `join` first."""

        def work() -> None:
            buffer.tensor.copy_(self._host[message], non_blocking=True)
            buffer.scatter()

        self._ends[message] = self._up.run(work)

    def join(self, message: int) -> None:
        """The script's own stream goes on when `message` is back."""
        self._streams.join(self._ends[message])

    def has_ended(self, message: int) -> bool:
        """Whether `message` is back, without waiting."""
        return message in self._ends and self._ends[message].query()

    def close(self) -> None:
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
