"""Staging: a copy of a device's gradient slots in CPU memory, where the host sums them.

Gloo and gradlane's transport send and receive in CPU memory. A gradient is copied down as soon as the
device has it, long before its message may start, and its sum is copied up when somebody needs it. So
whatever carries messages works on CPU memory as for a model on the CPU, and knows of no device.

Copies down have one stream and copies up another: both directions of the bus are used at once, and
neither waits for the script's stream. Owns one thread, which sleeps until the next copy down has
ended and then says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Lock, Thread

import torch

from gradlane.live.backends.gradient_buffers import GradientBuffers
from gradlane.live.backends.streams import Event, Streams
from gradlane.live.torch_modes import outside_of_modes

Then = Callable[[BaseException | None], None]
"""Called once, on the thread of `Staging`, with None or with the error of the copy."""
_Leaving = SimpleQueue[tuple[Event | None, Then] | None]
_LEFT_S = 5.0  # for which `close` waits for a copy in flight


class Staging:
    """The copies between the slots of one session on a device and their mirror in CPU memory.

    Threads: the training thread calls all methods, or a thread of autograd's that it waits for. Whichever thread needs a sum
    calls `bring_up`.

    Args:
        streams: of the device.

    Attributes:
        mirror: slots in pinned CPU memory, laid out as those on the device; set by `take_up`.
    """

    mirror: GradientBuffers

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        # gradients that wait to be sent go before kernels that are merely next
        self._down, self._up = streams.open(urgent=True), streams.open(urgent=True)
        self._returned: dict[int, Event] = {}  # by tensor: the end of its copy up, in this iteration
        self._last_return: Event | None = None
        self._lock = Lock()  # guards the two
        self._pinned: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
        self._leaving: _Leaving = SimpleQueue()
        # it refers to the queue alone, so that it ends with an object that nobody has closed
        self._thread = Thread(target=_tell_ends, args=(self._leaving, streams), name="gradlane-staging", daemon=True)
        weakref.finalize(self, self._leaving.put, None)
        self._thread.start()

    def take_up(self, params: Sequence[torch.nn.Parameter], slots: GradientBuffers) -> None:
        """Mirror other slots. No copy may be in flight.

        Args:
            params: those of `slots`, in order.
            slots: on the device.
        """
        self._slots, self.mirror = slots, GradientBuffers(params, self._memory)
        self._returned.clear()

    def _memory(self, like: torch.Tensor) -> torch.Tensor:
        """Pinned memory, the same in every order of the parameters: torch keeps what was once pinned."""
        kind = like.shape, like.dtype
        if kind not in self._pinned:
            self._pinned[kind] = self._streams.host_memory(like)
        return self._pinned[kind]

    def begin(self) -> None:
        """A new iteration begins: every sum of the one before has been copied up."""
        self._returned.clear()

    def bring_down(self, tensors: Sequence[int], then: Then) -> None:
        """Copy the slots of `tensors` to the mirror once the device has computed them; then call `then`.

        Args:
            tensors: one, or neighbours of one dtype.
            then: told of the end, after those of all earlier copies.
        """
        first, last = tensors[0], tensors[-1]

        def work() -> None:
            self.mirror.range_of(first, last).copy_(self._slots.range_of(first, last), non_blocking=True)

        after = [self._streams.so_far()]
        if self._last_return is not None:  # it reads the mirror
            after.append(self._last_return)
        with outside_of_modes():
            self._leaving.put((self._down.run(work, after), then))

    def then(self, call: Then) -> None:
        """Call `call` after the ends of all copies down so far were told."""
        self._leaving.put((None, call))

    def bring_up(self, tensors: Sequence[int]) -> None:
        """Let the script's stream wait until the sums of `tensors`, which are in the mirror, are in their slots.

        A sum is copied once an iteration. The host does not wait.
        """
        self._copy_up(tensors)
        for event in {id(event): event for event in map(self._returned.__getitem__, tensors)}.values():
            self._streams.join(event)

    def _copy_up(self, tensors: Sequence[int]) -> None:
        with self._lock:
            missing = sorted(tensor for tensor in tensors if tensor not in self._returned)
            if missing:
                self._queue_up(missing)

    def _queue_up(self, tensors: Sequence[int]) -> None:
        def work() -> None:
            for first, last in self._slots.runs(tensors):
                self._slots.range_of(first, last).copy_(self.mirror.range_of(first, last), non_blocking=True)

        # the slots are free: the copy down, which the host knows to be over, was the last to use them
        with outside_of_modes():
            self._last_return = self._up.run(work)
        self._returned.update(dict.fromkeys(tensors, self._last_return))

    def run_above(self, tensors: Sequence[int], work: Callable[[], object], then: Then) -> None:
        """Run `work` on the device once the sums of `tensors`, which are in the mirror, are in their slots; call `then` at its
        end. Any thread; the thread of `Staging` calls both.
        """

        def begin(error: BaseException | None) -> None:
            try:
                self._copy_up(tensors)
                self._leaving.put((self._up.run(work), then))
            except Exception as raised:
                then(raised)

        self.then(begin)

    @property
    def slots(self) -> Sequence[torch.Tensor]:
        """Those of all tensors, on the device."""
        return self._slots.slots

    @property
    def device(self) -> torch.device:
        """That the slots are on."""
        return self._slots.slots[0].device

    def close(self) -> None:
        """End the thread, after at most 5 s."""
        self._leaving.put(None)
        self._thread.join(_LEFT_S)


def _tell_ends(leaving: _Leaving, streams: Streams) -> None:
    """The thread of a `Staging`: sleep until each copy has ended, and say so."""
    streams.use_here()
    while (copy := leaving.get()) is not None:
        event, then = copy
        try:
            if event is not None:
                event.synchronize()
        except Exception as error:
            then(error)
        else:
            then(None)
