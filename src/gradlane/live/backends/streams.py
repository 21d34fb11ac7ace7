"""Streams: a device's queues of work, beside the one that the training script fills. The host waits for none of them.

Everything that a session does with a device's streams and events goes through here, so that backends can be run with
streams of another kind (tests have threads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch


class Event(Protocol):
    """A place in a stream: over once all that was queued before it is done."""

    def query(self) -> bool:
        """Whether it is over, without waiting."""

    def synchronize(self) -> object:
        """Return when it is over, asleep until then. Raises `RuntimeError` if the device has failed."""


class Stream(Protocol):
    """Runs what is queued on it, in order."""

    def run(self, work: Callable[[], object], after: Iterable[Event] = ()) -> Event:
        """Queue what `work` queues, to begin when `after` are over. Returns the event of its end."""


class Streams(Protocol):
    """The streams of one device."""

    def open(self) -> Stream:
        """A stream of its own."""

    def so_far(self) -> Event:
        """The end of what the script's own stream has been given so far."""

    def join(self, event: Event) -> None:
        """The script's own stream goes on when `event` is over."""

    def host_memory(self, like: torch.Tensor) -> torch.Tensor:
        """As many elements in CPU memory, such that copies to and from the device need no wait on the host."""


class DeviceStreams:
    """Those of an accelerator that torch knows."""

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
            end = torch.Event(self._device, blocking=True)  # whoever waits for it sleeps
            self._stream.record_event(end)
            return end


def streams_of(device: torch.device) -> Streams | None:
    """The streams of `device`; None for the CPU, which does at once what it is told."""
    return None if device.type == "cpu" else DeviceStreams(device)
