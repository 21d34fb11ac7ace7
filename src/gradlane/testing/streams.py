"""A device's streams on the CPU, with a check that every use of memory is ordered.

    streams = CheckedStreams(late=True)
    with streams.watching():
        data = torch.ones(4)
        end = streams.open().run(lambda: data.mul_(2), after=[streams.so_far()])
        streams.join(end)  # without it: AssertionError, with the places of both uses
        data.add_(1)

`CheckedStreams` takes the place of a device's streams (`gradlane.live.backends.streams.Streams`), with the CPU as the device.
Its streams run as late, or as early, as a device may. Whatever they do, each use of a tensor is held against the clocks of
`happens_before`. A use that no wait orders after the last write, or a write that none orders after the reads since, is a
`Race`. So is memory that is freed while a stream other than its own may use it: a caching allocator hands it out again at once,
unless `record_stream` was called.

What is seen: each ATen operation and each collective of torch.distributed, by a dispatch mode, on the
thread that is `watching` and in the work of streams. Native code, `.numpy()` and `.tolist()` are not:
declare them with `host_accesses`.

What is taken for granted:
- All threads of the host are one timeline. They synchronise by locks that a checker cannot see, so
  what one of them has waited for, all are taken to know.
- A strided tensor uses all bytes between its first and its last element.
- A collective uses its tensors on the stream that calls it, in turn. A missing `Work.wait` is not found.
- What `torch.compile` has compiled runs eagerly: dynamo leaves frames under a dispatch mode alone.
- A backward pass runs on the stream that is current, where a device runs it on those of the forward.
- A closure that has not run keeps its tensors, where a device would have run it. It lets go of them
  before its end is waited for, as a device's would.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from gradlane.live import torch_modes
from gradlane.live.backends.streams import Event, Stream
from gradlane.live.session import torch_patches
from gradlane.testing import happens_before, operations
from gradlane.testing.happens_before import Access, Conflict, Frames, Memory, Timeline, place_of
from gradlane.testing.operations import Kind, effects_of, span, tensors_in

_SHOWN = 20  # races in the message of `check`
_FRAMES = 3  # of an access that are named
_OUTER_FRAMES = 100  # looked through for them
_NOT_NAMED = (
    os.path.dirname(torch.__file__),
    torch_patches.__file__,  # its functions stand in the place of torch's
    *(__file__, happens_before.__file__, operations.__file__),
)
_STDLIB = os.path.dirname(os.__file__)
_AS_IT_IS = contextlib.nullcontext()


@dataclass(frozen=True)
class Race:
    """Two uses of the same memory, at least one of them a write or its end, in no order.

    Attributes:
        earlier: was noted first; on a device either may come first.
        earlier_wrote: whether it wrote.
        later: the other one.
        later_did: what it did.
        begin: the first byte that both use, in the tensor's storage.
        end: the byte after the last.
    """

    earlier: Access
    earlier_wrote: bool
    later: Access
    later_did: Literal["read", "wrote", "freed"]
    begin: int
    end: int

    def __str__(self) -> str:
        did = "wrote" if self.earlier_wrote else "read"
        missing = (
            f"there is no record_stream, and {self.later.timeline.name} does not wait for it"
            if self.later_did == "freed"
            else f"{self.later.timeline.name} does not wait for it"
        )
        return (
            f"bytes {self.begin} to {self.end} of a tensor's memory: {self.earlier} {did} them; {self.later} "
            f"{self.later_did} them, and {missing}"
        )


class CheckedStreams:
    """`Streams` on the CPU that find uses of memory which nothing orders.

    All methods may be called on any thread.

    Args:
        late: streams that are opened do nothing until somebody waits for them. No event is over for the host until it has
            waited for that event or a later one. Otherwise all is over at once.
        orders: whether collectives run in the current stream, as with NCCL; see `Streams.orders`.

    Attributes:
        waits: how often the host has waited for a stream that the script works on.
        host_syncs: how often the training thread, which made this or is `watching`, has waited for an event.
        implicit_syncs: how often an operation on the training thread has waited for the device: `.item()`,
            `nonzero`, a blocking copy from or to `host_memory`.
    """

    def __init__(self, late: bool, orders: bool = False) -> None:
        self.waits = self.host_syncs = self.implicit_syncs = 0
        self.late, self._orders = late, orders
        self._training = threading.get_ident()
        # guards clocks and memory; frees come at any point of a thread that has it
        self.lock = threading.RLock()
        self.turn = threading.Condition()
        self.host = Timeline("the host")
        self._script = CheckedStream(self, Timeline("the script's stream"), is_scripts=True)
        self._opened: list[CheckedStream] = []
        self.numbers = itertools.count()
        self._here = _Here(self._script)
        self._memory: dict[int, _Storage] = {}
        self._freed: deque[tuple[_Storage, dict[Timeline, int], Access]] = deque()
        self._races: dict[tuple[Any, ...], Race] = {}

    # -- as a device has them ------------------------------------------------------------------------------

    def open(self, urgent: bool = False) -> CheckedStream:
        at = place_of(self.frames()[:1])
        with self.lock:
            stream = CheckedStream(self, Timeline(f"stream {len(self._opened)} (opened at {at})"), is_scripts=False)
            self._opened.append(stream)
        return stream

    def use_here(self) -> None:
        """All threads use the CPU."""

    def scripts(self) -> CheckedStream:
        return self._here.stream

    def so_far(self) -> CheckedEvent:
        stream = self._here.stream
        with self.lock:
            stream.timeline.wait_for(self.host.clock)
            stream.timeline.step()
            return CheckedEvent(self, stream, stream.timeline.now(), of_script=stream.is_scripts)

    def mark(self) -> CheckedMark:
        return CheckedMark(time.monotonic_ns())

    def join(self, event: Event) -> None:
        clock = self.clock_of(event)
        with self.lock:
            self._here.stream.timeline.wait_for(clock)

    def host_memory(self, like: torch.Tensor) -> torch.Tensor:
        """CPU memory of the shape and dtype of `like`, for the host: full of NaN if that is possible."""
        muted, self._here.muted = self._here.muted, True
        try:
            memory = torch.full(like.shape, torch.nan if like.is_floating_point() else 0, dtype=like.dtype)
        finally:
            self._here.muted = muted
        with self.lock:
            self._storage(memory).kind = "pinned"
        return memory

    def orders(self, group: object) -> bool:
        return self._orders

    # -- for tests -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def entered(self, stream: CheckedStream) -> Iterator[None]:
        """The calling thread works on `stream`, as in `with torch.cuda.stream(...)` of a script.

        Its operations run at once, after all that the stream was given.
        """
        while (queued := stream.next) is not None:
            queued.end.reach()
        stream.is_scripts = True
        with self.on(stream):
            yield

    def host_accesses(self, tensor: torch.Tensor, writes: bool) -> None:
        """Code of the host that no dispatch mode sees reads `tensor`, or writes it.

        Where that takes a while, call this both when it begins and when it has ended: each call is one moment.

        Args:
            tensor: memory that the host can use.
            writes: whether it is written.
        """
        with self.lock:
            self._use(tensor, _Operation("code of the host", None, set()), writes)

    def used_by(self, tensor: torch.Tensor, stream: Stream) -> None:
        """What `Tensor.record_stream` does: once freed, the memory of `tensor` is not handed out again until
        `stream` has done what it has been given by then.
        """
        assert isinstance(stream, CheckedStream)
        with self.lock:
            self._storage(tensor).recorded.add(stream.timeline)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what the calling thread does, which is the training thread from now on, and `check` at the end.

        Deferred updates are watched too, which otherwise run outside of all dispatch modes. They are so
        for the whole process: let one thread at a time watch.
        """
        self._training = threading.get_ident()
        with _in_gradlane(self), _Noting(self):
            yield
        self.check()

    @property
    def races(self) -> list[Race]:
        """Those found so far; of races between the same two places, the first."""
        with self.lock:
            self._look_at_freed()
            return list(self._races.values())

    def check(self) -> None:
        """Run what the streams have been given, and raise `AssertionError` if there are races.

        Raises also what that work raises.
        """
        while waiting := [queued for stream in self._opened if (queued := stream.next) is not None]:
            min(waiting, key=lambda queued: queued.number).end.reach()
        races = self.races
        if races:
            shown = "\n".join(f"- {race}" for race in races[:_SHOWN])
            more = f"\n- and {len(races) - _SHOWN} more, in `races`" if len(races) > _SHOWN else ""
            raise AssertionError(
                f"{len(races)} uses of memory are not ordered; wait for an event between the two:\n{shown}{more}"
            )

    # -- streams and events --------------------------------------------------------------------------------

    def clock_of(self, event: Event) -> Mapping[Timeline, int]:
        """What is over when `event` is, once that is known. The host learns nothing by it."""
        if isinstance(event, CheckedEvent):
            return event.reach()
        if not event.query():
            event.synchronize()
        return {}

    @contextlib.contextmanager
    def on(self, stream: CheckedStream, queued_at: Frames | None = None) -> Iterator[None]:
        """The calling thread works on `stream`: on what was queued at a place, or as a script does."""
        here = self._here
        before = here.stream, here.queued_at
        here.stream, here.queued_at = stream, queued_at
        pushes = not self.is_noting()
        if pushes:
            # `with` would also change flags of the whole process, in whatever order threads get here
            _push_mode(_Noting(self))
        try:
            yield
        finally:
            if pushes:
                _pop_mode()
            here.stream, here.queued_at = before

    def is_noting(self) -> bool:
        return any(isinstance(mode, _Noting) and mode.streams is self for mode in _get_current_dispatch_mode_stack())

    def host_waited(self, clock: Mapping[Timeline, int]) -> None:
        with self.lock:
            self.host.wait_for(clock)

    def host_knows(self, clock: Mapping[Timeline, int]) -> bool:
        with self.lock:
            return all(self.host.clock.get(timeline, 0) >= time for timeline, time in clock.items())

    # -- operations ----------------------------------------------------------------------------------------

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operation, and note what it reads and writes."""
        if self._here.muted:
            return func(*args, **kwargs)
        effects = effects_of(func)
        reads, writes, others = effects.of(args, kwargs)
        with self.lock:
            self._look_at_freed()
            known = {id(tensor.untyped_storage()) for tensor in itertools.chain(reads, writes, others)}
            # what is made like known memory, without a look at it, is where that is
            like = [each for each in others if id(each.untyped_storage()) in self._memory]
            operation = self._operation(effects.name, [*reads, *writes] or like)
            for tensor in reads:
                self._use(tensor, operation, writes=False)
            for tensor in writes:
                self._use(tensor, operation, writes=True)
        result = func(*args, **kwargs)
        with self.lock:
            for tensor in tensors_in(result):
                key = id(tensor.untyped_storage())
                if key not in known and key not in self._memory:
                    self._made(tensor, operation)
            if effects.is_constant:
                self._keep_numbers(others)
            if operation.stream is not None and effects.waits(operation.kinds, args, kwargs):
                self.host.wait_for(operation.stream.timeline.clock)
                self.implicit_syncs += threading.get_ident() == self._training
        return result

    def _operation(self, name: str, tensors: Sequence[torch.Tensor]) -> _Operation:
        """An operation that uses `tensors`. The host does at once what is in its memory alone."""
        here = self._here
        kinds = {self._storage(tensor).kind for tensor in tensors}
        on_host = bool(kinds) and (kinds == {"number"} or (here.queued_at is None and "device" not in kinds))
        if here.queued_at is None:
            here.stream.timeline.wait_for(self.host.clock)
        return _Operation(name, None if on_host else here.stream, kinds)

    def _use(self, tensor: torch.Tensor, operation: _Operation, writes: bool) -> None:
        begin, end = span(tensor)
        if begin == end:
            return
        storage = self._storage(tensor)
        on_host = operation.stream is None or storage.kind == "number"
        timeline = self.host if on_host or operation.stream is None else operation.stream.timeline
        access = operation.accesses.get(timeline)
        if access is None:
            access = Access(timeline, timeline.step(), operation.name, self.frames())
            operation.accesses[timeline] = access
        memory = storage.memory
        for conflict in (memory.write if writes else memory.read)(begin, end, access, timeline.clock):
            self._found(conflict, access, "wrote" if writes else "read")

    def _made(self, tensor: torch.Tensor, operation: _Operation) -> None:
        """`operation` has allocated `tensor`, and wrote it. Where it did not, its stream waits for what had the memory."""
        storage = self._storage(tensor)
        if operation.stream is None:
            storage.kind = "number" if operation.kinds == {"number"} else "pinned"
        else:
            storage.allocated_on = operation.stream.timeline
        self._use(tensor, operation, writes=True)

    def _keep_numbers(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors made of one Python number are the host's, such as an optimizer's `step`."""
        for tensor in tensors:
            if tensor.dim() == 0 and id(tensor.untyped_storage()) not in self._memory:
                self._storage(tensor).kind = "number"

    def _found(self, conflict: Conflict, later: Access, did: Literal["read", "wrote", "freed"]) -> None:
        earlier = conflict.access
        places = (earlier.timeline, earlier.operation, earlier.frames, later.timeline, later.operation, later.frames)
        if places not in self._races:
            self._races[places] = Race(earlier, conflict.wrote, later, did, conflict.begin, conflict.end)

    # -- memory --------------------------------------------------------------------------------------------

    def _storage(self, tensor: torch.Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps the Python object as long as the memory
        found = self._memory.get(key)
        if found is None:
            found = self._memory[key] = _Storage(weakref.ref(storage, functools.partial(self._gone, key)))
        return found

    def _gone(self, key: int, _: object) -> None:
        """Memory has been freed, on any thread, at any point of this code: only leave a note."""
        storage = self._memory.pop(key)
        if storage.allocated_on is None or storage.kind != "device":
            return
        timeline = storage.allocated_on
        clock = timeline.now()
        for known, at in self.host.now().items():
            clock[known] = max(clock.get(known, 0), at)
        self._freed.append((storage, clock, Access(timeline, clock.get(timeline, 0), "the allocator", self.frames())))

    def _look_at_freed(self) -> None:
        while self._freed:
            storage, clock, freed = self._freed.popleft()
            for conflict in storage.memory.free(clock):
                if conflict.access.timeline not in storage.recorded:
                    self._found(conflict, freed, "freed")

    def frames(self) -> Frames:
        """Where the calling thread is: the innermost frames outside of torch, Python and this checker. In the work of a
        stream those of that work come first, then those that queued it.
        """
        found: list[tuple[CodeType, int]] = []
        frame: FrameType | None = sys._getframe(1)
        for _ in range(_OUTER_FRAMES):
            if frame is None or len(found) == _FRAMES:
                break
            code = frame.f_code
            if code is _DOES_WORK:
                found.extend((self._here.queued_at or ())[: _FRAMES - len(found)])
                break
            if _is_named(code.co_filename):
                found.append((code, frame.f_lineno))
            frame = frame.f_back
        return tuple(found)


class _Here(threading.local):
    """What each thread does: the stream it works on, where that work was queued, and whether nothing is noted."""

    def __init__(self, stream: CheckedStream) -> None:
        self.stream = stream
        self.queued_at: Frames | None = None  # None: it works as a script does
        self.muted = False


@functools.cache
def _is_named(filename: str) -> bool:
    if filename.startswith(_NOT_NAMED) or filename.startswith("<"):
        return False
    return not filename.startswith(_STDLIB) or "site-packages" in filename


# -- streams and events ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckedMark:
    """A point in a stream of `CheckedStreams`, whose work takes no time of its own."""

    at_ns: int

    def until_ns(self, later: CheckedMark) -> int:
        return later.at_ns - self.at_ns


class CheckedEvent:
    """A point in a stream of `CheckedStreams`."""

    def __init__(
        self, streams: CheckedStreams, stream: CheckedStream, clock: dict[Timeline, int] | None, of_script: bool = False
    ) -> None:
        self._streams, self._stream = streams, stream
        self._clock = clock  # None: not reached yet
        self._of_script = of_script
        self._error: BaseException | None = None

    @property
    def is_reached(self) -> bool:
        return self._clock is not None

    def query(self) -> bool:
        """Whether it is over; then the host knows so. With late streams it is once the host has waited for it, or
        for something after it.
        """
        if self._clock is None:
            return False
        if self._streams.late and not self._streams.host_knows(self._clock):
            return False
        self._streams.host_waited(self._clock)
        return True

    def synchronize(self) -> None:
        """Run the stream up to here, if that has not been done; the host knows then that it is over.

        Raises what the work before it raised.
        """
        with self._streams.lock:
            self._streams.host_syncs += threading.get_ident() == self._streams._training
            self._streams.waits += self._of_script
        self._streams.host_waited(self.reach())

    def reach(self) -> dict[Timeline, int]:
        """Run the stream up to here, and return what is over then. Raises what the work before it raised."""
        if self._clock is None:
            self._stream.run_up_to(self)
        if self._clock is None:
            raise AssertionError(f"{self._stream.timeline.name}: its work waits for work that it was given later")
        if self._error is not None:
            raise self._error
        return self._clock

    def is_over(self, clock: dict[Timeline, int], error: BaseException | None) -> None:
        self._error, self._clock = error, clock


@dataclass
class _Queued:
    """Work that a stream has been given."""

    number: int  # of all streams, in the order in which they were given it
    work: Callable[[], object] | None
    after: list[Event]
    end: CheckedEvent
    known: dict[Timeline, int]  # to the host
    frames: Frames


class CheckedStream:
    """A stream of `CheckedStreams`. It runs its work on whatever thread waits for it, or at once."""

    def __init__(self, streams: CheckedStreams, timeline: Timeline, is_scripts: bool) -> None:
        self.timeline = timeline
        self.is_scripts = is_scripts  # whether a script works on it, which operations do at once
        self._streams = streams
        self._queue: deque[_Queued] = deque()
        self._runs_on: int | None = None  # the thread that does

    def run(self, work: Callable[[], object], after: Iterable[Event] = ()) -> CheckedEvent:
        streams = self._streams
        end = CheckedEvent(streams, self, None, self.is_scripts)
        with streams.lock:
            queued = _Queued(next(streams.numbers), work, list(after), end, streams.host.now(), streams.frames())
        if self._runs_on == threading.get_ident():  # what its own work queues comes here, in the midst of that
            self._do(queued)
            end.reach()
            return end
        self._queue.append(queued)
        if self.is_scripts or not streams.late:
            end.reach()
        return end

    @property
    def next(self) -> _Queued | None:
        """The first work that has not begun."""
        with self._streams.turn:
            return self._queue[0] if self._queue else None

    def run_up_to(self, end: CheckedEvent) -> None:
        """Run what was queued up to `end`, or wait for the thread that does."""
        # Not under a lock: what runs may wait for other ranks, or for other streams on which other threads are
        turn, me = self._streams.turn, threading.get_ident()
        while True:
            with turn:
                turn.wait_for(lambda: end.is_reached or self._runs_on in (None, me))
                if end.is_reached or self._runs_on == me:
                    return
                self._runs_on = me
                queued = self._queue.popleft()
            try:
                self._do(queued)
            finally:
                with turn:
                    self._runs_on = None
                    turn.notify_all()

    def _do(self, queued: _Queued) -> None:
        streams, error = self._streams, None
        try:
            clocks = [streams.clock_of(event) for event in queued.after]
            with streams.lock:
                for clock in (queued.known, *clocks):
                    self.timeline.wait_for(clock)
            work, queued.work = queued.work, None
            assert work is not None
            # a device would have run it where it was queued
            with _AS_IT_IS if self.is_scripts else torch_modes.outside_of_modes(), streams.on(self, queued.frames):
                work()
                del work  # frees what it alone has kept, before anybody has waited for its end
        except BaseException as raised:  # whoever waits for it gets it
            error = raised
        with streams.lock:
            self.timeline.step()
            queued.end.is_over(self.timeline.now(), error)

    def __repr__(self) -> str:
        return self.timeline.name


_DOES_WORK = CheckedStream._do.__code__


# -- what operations do to memory ----------------------------------------------------------------------------


@dataclass
class _Storage:
    """What is known of the memory of one storage."""

    alive: weakref.ref[Any]  # its callback tells that it is not
    kind: Kind = "device"
    allocated_on: Timeline | None = None  # None: not known
    recorded: set[Timeline] = field(default_factory=set)  # see `used_by`
    memory: Memory = field(default_factory=Memory)


@dataclass
class _Operation:
    """A call of an operation, and its accesses by timeline."""

    name: str
    stream: CheckedStream | None  # None: the host does it
    kinds: set[Kind]  # of memory that it uses
    accesses: dict[Timeline, Access] = field(default_factory=dict)


# -- modes -----------------------------------------------------------------------------------------------------


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what operations of this thread do."""

    sees_updates_at_any_time = True  # a session may defer updates under it

    def __init__(self, streams: CheckedStreams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.streams.note(func, args, kwargs or {})


@contextlib.contextmanager
def _in_gradlane(streams: CheckedStreams) -> Iterator[None]:
    """Where gradlane leaves all dispatch modes, come back to that of `streams`."""

    @contextlib.contextmanager
    def leave_others() -> Iterator[Any]:
        noting = streams.is_noting()
        with _disable_current_modes() as left, _Noting(streams) if noting else contextlib.nullcontext():
            yield left

    with patch.object(torch_modes, "_disable_current_modes", leave_others):
        yield
