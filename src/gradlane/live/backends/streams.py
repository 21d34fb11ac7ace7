"""Streams: a device's queues of work, beside the stream that the training script fills. The host
never waits for them.

Sessions use a device's streams and events only through these interfaces, so that tests can run
backends with threads in place of streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from gradlane.live.torch_versions import require_release


class Event(Protocol):
    """A point in a stream; over once the work queued before it is done."""

    def query(self) -> bool:
        """Whether it is over, without waiting."""

    def synchronize(self) -> object:
        """Block, asleep, until it is over. Raises `RuntimeError` if the device has failed."""


class Stream(Protocol):
    """A queue of work that a device runs in order."""

    def run(self, work: Callable[[], object], after: Iterable[Event] = ()) -> Event:
        """Call `work` with this stream as the current one, so that its kernels are queued here.

        Args:
            work: queues kernels and copies.
            after: events that must be over before these begin.

        Returns:
            The event at their end.
        """


class Streams(Protocol):
    """The streams of one device."""

    def open(self) -> Stream:
        """A new stream."""

    def so_far(self) -> Event:
        """An event at the end of the work queued on the script's stream so far."""

    def join(self, event: Event) -> None:
        """Make the script's stream wait for `event`."""

    def host_memory(self, like: torch.Tensor) -> torch.Tensor:
        """Pinned CPU memory of the shape and dtype of `like`; copies between it and the device do
        not block the host.
        """


class DeviceStreams:
    """The streams of an accelerator that torch supports."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def open(self) -> Stream:
        return _DeviceStream(self._device)

    def so_far(self) -> Event:
        return torch.accelerator.current_stream(self._device).record_event()

    def join(self, event: Event) -> None:
        assert isinstance(event, torch.Event)
        torch.accelerator.current_stream(self._device).wait_event(event)

    def host_memory(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


class _DeviceStream:
    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.Stream(device)

    def run(self, work: Callable[[], object], after: Iterable[Event] = ()) -> Event:
        with self._stream:
            for event in after:
                assert isinstance(event, torch.Event)
                self._stream.wait_event(event)
            work()
            # blocking: a host thread that waits for it sleeps
            end = torch.Event(self._device, blocking=True)
            self._stream.record_event(end)
            return end


def streams_of(device: torch.device) -> Streams | None:
    """The streams of `device`; None for the CPU, which runs work at once.

    Raises:
        UnsupportedError: this release of PyTorch has no `torch.accelerator`.
    """
    if device.type == "cpu":
        return None
    require_release((2, 6), f"a session on {device.type}")
    return DeviceStreams(device)
