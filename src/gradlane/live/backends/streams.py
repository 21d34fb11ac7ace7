"""Streams: a device's queues of work, beside the stream that the training script fills. The host
never waits for them, unless it asks an event.

Sessions use a device's streams and events only through these interfaces. `gradlane.testing.streams`
has streams on the CPU, which check that every access to memory is ordered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from gradlane.live.backends.process_groups import is_gloo
from gradlane.live.torch_versions import require_release
from gradlane.transport.forks import collect_nothing_inherited


class Event(Protocol):
    """A point in a stream; over once the work queued before it is done."""

    def query(self) -> bool:
        """Whether it is over, without waiting."""

    def synchronize(self) -> object:
        """Block, asleep, until it is over. Raises `RuntimeError` if the device has failed."""


class Mark(Protocol):
    """A point in a stream whose time the device notes."""

    def until_ns(self, later: Any) -> int:
        """Time on the device from here to another mark, in ns; both are over."""


class Stream(Protocol):
    """A queue of work that a device runs in order. Two objects for one queue are equal."""

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

    def open(self, urgent: bool = False) -> Stream:
        """A new stream.

        Args:
            urgent: the device prefers its work to that of ordinary streams.
        """

    def use_here(self) -> None:
        """Let this thread, a new one, work with the device: a call for it may open another one else."""

    def scripts(self) -> Stream:
        """The stream that this thread queues work on: the script's own, or a side stream that the script has entered."""

    def so_far(self) -> Event:
        """An event at the end of the work queued on the script's stream so far."""

    def mark(self) -> Mark:
        """As `so_far`, with the time."""

    def join(self, event: Event) -> None:
        """Make the script's stream wait for `event`."""

    def host_memory(self, like: torch.Tensor) -> torch.Tensor:
        """Pinned CPU memory of the shape and dtype of `like`; copies between it and the device do
        not block the host.
        """

    def orders(self, group: Any) -> bool:
        """Whether a collective of this process group takes its turn in the current stream, as NCCL's do.

        Gloo's are carried out by the host: a wait for one blocks the host.
        """


class DeviceStreams:
    """The streams of an accelerator that torch supports."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        collect_nothing_inherited()  # plans that are over leave events in cycles of objects

    def open(self, urgent: bool = False) -> Stream:
        return _DeviceStream(self._device, torch.Stream(self._device, priority=-1 if urgent else 0))

    def use_here(self) -> None:
        if self._device.index is not None:
            torch.accelerator.set_device_index(self._device.index)

    def scripts(self) -> Stream:
        return _DeviceStream(self._device, torch.accelerator.current_stream(self._device))

    def so_far(self) -> Event:
        return torch.accelerator.current_stream(self._device).record_event()

    def mark(self) -> Mark:
        event = torch.Event(self._device, enable_timing=True)
        torch.accelerator.current_stream(self._device).record_event(event)
        return _DeviceMark(event)

    def join(self, event: Event) -> None:
        assert isinstance(event, torch.Event)
        torch.accelerator.current_stream(self._device).wait_event(event)

    def host_memory(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True, device="cpu")

    def orders(self, group: Any) -> bool:
        return not is_gloo(group, self._device)


class _DeviceMark:
    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def until_ns(self, later: _DeviceMark) -> int:
        for event in (self._event, later._event):
            event.synchronize()
        return round(self._event.elapsed_time(later._event) * 1e6)


class _DeviceStream:
    def __init__(self, device: torch.device, stream: torch.Stream) -> None:
        self._device, self._stream = device, stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _DeviceStream) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[int, int]:
        # torch.Stream and torch.cuda.Stream of one queue are not equal on all releases
        return self._stream.stream_id, self._stream.device_index

    def run(self, work: Callable[[], object], after: Iterable[Event] = ()) -> Event:
        # `with self._stream` needs PyTorch 2.7; to set a stream makes its device the current one
        before, index = torch.accelerator.current_stream(self._device), torch.accelerator.current_device_index()
        torch.accelerator.set_stream(self._stream)
        try:
            for event in after:
                assert isinstance(event, torch.Event)
                self._stream.wait_event(event)
            work()
            # blocking: a host thread that waits for it sleeps
            end = torch.Event(self._device, blocking=True)
            self._stream.record_event(end)
            return end
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(index)


def stream_of(stream: torch.Stream) -> Stream:
    """A stream of the script's as this module's."""
    return _DeviceStream(stream.device, stream)


def streams_of(device: torch.device) -> Streams | None:
    """The streams of `device`; None for the CPU, which runs work at once.

    Raises:
        UnsupportedError: this release of PyTorch has no `torch.accelerator`.
    """
    if device.type == "cpu":
        return None
    require_release((2, 6), f"a session on {device.type}")
    return DeviceStreams(device)
