"""Sums over torch.distributed: what `AllReduceBackend.prepare` makes of a plan.

Each rank must start collectives in one order, since torch.distributed matches them by that alone. `_next_in_order` compares
each message with the agreed order. It raises an error where ranks would add different messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec import UNSET

from gradlane.core.plan import Plan
from gradlane.errors import OrderError
from gradlane.live.backends.base import OnDone, OnSent, Sums
from gradlane.live.backends.gradient_buffers import MessageBuffer
from gradlane.live.backends.hierarchy import HierarchicalSum, Hosts, Stages
from gradlane.live.backends.norms import Norms, NormsExchange, part_lengths, scatter_of_others
from gradlane.live.backends.owned_sum import OwnedSum
from gradlane.live.backends.process_groups import ProcessGroups, UnderWay, all_reduce, unrecorded
from gradlane.live.backends.streams import Event, Stream, Streams
from gradlane.live.backends.two_phase import TwoPhase

_SUM = dist.AllreduceOptions()
"""A sum, where nothing else is said."""
_SHORTLY_BYTES = 64 << 10
"""Behind a sum in a stream: an update for each small tensor costs the host more than to wait for so much."""


class _InOrder(Sums):
    """Messages that ranks must start in one order.

    Args:
        plan: to carry out.
        buffers: of its messages.
        weight: parts of each lane, over which its messages are dealt.
    """

    needs_one_order = True
    tells_sends = False

    def __init__(self, plan: Plan, buffers: Sequence[MessageBuffer], weight: int) -> None:
        self._plan, self._buffers, self._weight = plan, buffers, weight
        self._lanes = [message.lane for message in plan.messages]
        self._expected: list[list[int]] = [[] for _ in plan.lanes]
        self._issued = [0] * len(plan.lanes)

    def begin(self, expected: list[list[int]]) -> None:
        self._expected = expected
        self._issued = [0] * len(expected)

    def expect(self, message: int) -> None:
        self._expected[self._lanes[message]].append(message)

    def _next_in_order(self, message: int) -> int:
        """The part of its lane that carries `message`. Raises `OrderError` unless it is the next in its lane's
        agreed order.
        """
        lane = self._lanes[message]
        place, expected = self._issued[lane], self._expected[lane]
        if place >= len(expected) or expected[place] != message:
            wanted = self._plan.describe_message(expected[place]) if place < len(expected) else "nothing"
            raise OrderError(
                f"about to start {self._plan.describe_message(message)} as number {place} of lane {lane}, "
                f"where the agreed order has {wanted}; nothing was sent"
            )
        self._issued[lane] = place + 1
        # each part gets the same messages of the lane's order, in the same order, on every rank
        return lane + len(self._issued) * (message % self._weight)


class _Phase(NamedTuple):
    """One phase of a message.

    Attributes:
        before: called first; None for nothing.
        begin: begins collectives in a process group; returns the works to wait for.
        after: called when they have ended; None for nothing.
    """

    before: Callable[[], None] | None
    begin: Callable[[Any], list[Any]]
    after: Callable[[], None] | None


class FlatSums(_InOrder):
    """Sums over all ranks at once, in CPU memory. A thread of torch.distributed tells of an end when the bytes have arrived.

    Args:
        plan, buffers, weight: of the messages.
        groups: have the threads that tell.
        group_of_part: for each part of a lane its process group. The backend empties it when it closes.
        exchange: of the sums' norms; None where tensors have no owners.
    """

    def __init__(
        self,
        plan: Plan,
        buffers: Sequence[MessageBuffer],
        weight: int,
        groups: ProcessGroups,
        group_of_part: list[Any],
        exchange: NormsExchange | None,
    ) -> None:
        super().__init__(plan, buffers, weight)
        self._groups, self._group_of_part, self._exchange = groups, group_of_part, exchange
        self.norms = None if exchange is None else exchange.norms
        two_phase = _two_phase_sums(plan, buffers, group_of_part[0])
        self._first = [self._first_phase(buffer, two_phase.get(message)) for message, buffer in enumerate(buffers)]
        self._second = {
            message: _Phase(None, partial(unrecorded, each.gather), _copies_out(plan, message, buffers[message], each))
            for message, each in two_phase.items()
        }
        # Second phases start when all first ones have ended. Groups of one lane end messages in no order, so that
        # which of them makes room first is not known. A thread that waits for norms awaits no message.
        self._tells_at_once = bool(two_phase) or exchange is not None or (weight > 1 and plan.has_windows)
        self._untold: dict[int, UnderWay] = {}  # messages whose ends are not told by themselves
        self._awaited: set[int] = set()

    def _first_phase(self, buffer: MessageBuffer, two_phase: TwoPhase | OwnedSum | None) -> _Phase:
        before, after = (buffer.gather, buffer.scatter) if buffer.is_copy else (None, None)
        if two_phase is None:
            return _Phase(before, partial(_all_reduce, buffer.tensor), after)
        # with owners, what others own comes again in the second phase
        add = two_phase.add if self.norms is None else partial(_in_turn, two_phase.add, buffer.scatter)
        return _Phase(before, partial(unrecorded, two_phase.scatter), add)

    def begin(self, expected: list[list[int]]) -> None:
        super().begin(expected)
        self._awaited.clear()
        if self.norms is not None:
            self.norms.begin()

    def start(self, message: int, ready: list[Event], on_done: OnDone, on_sent: OnSent) -> bool:
        if self._exchange is not None:
            on_done = self._exchange.once_there(on_done)
        return self._begin(message, self._first[message], on_done)

    def start_second_phase(self, message: int, on_done: OnDone) -> bool:
        return self._begin(message, self._second[message], on_done)

    def _begin(self, message: int, phase: _Phase, on_done: OnDone) -> bool:
        group = self._group_of_part[self._next_in_order(message)]
        if phase.before is not None:
            phase.before()
        begun = UnderWay(self._groups, phase.begin(group), partial(_ended, phase.after, message, on_done))
        if self._tells_at_once or message in self._awaited:
            begun.tell()
        else:
            self._untold[message] = begun
        return False

    def look(self) -> None:
        """Tell of the sums that have ended, up to the first that has not."""
        while self._untold:
            message, begun = next(iter(self._untold.items()))
            if not begun.tell_if_ended():
                return
            del self._untold[message]

    def await_ends(self, messages: Iterable[int]) -> None:
        for message in messages:
            self._awaited.add(message)
            begun = self._untold.pop(message, None)
            if begun is not None:
                begun.tell()


class HierarchicalSums(_InOrder):
    """Sums within hosts first (`hierarchy`), in CPU memory.

    Args:
        plan, buffers, weight: of the messages.
        stages: of each part of a lane.
        hosts: of this rank.
    """

    def __init__(
        self, plan: Plan, buffers: Sequence[MessageBuffer], weight: int, stages: Sequence[Stages], hosts: Hosts
    ) -> None:
        super().__init__(plan, buffers, weight)
        two_phase = set(plan.second_phases)
        self._stages = stages
        self._sums = [HierarchicalSum(buffer.tensor, hosts, message in two_phase) for message, buffer in enumerate(buffers)]

    def start(self, message: int, ready: list[Event], on_done: OnDone, on_sent: OnSent) -> bool:
        stages, buffer, each = self._stages[self._next_in_order(message)], self._buffers[message], self._sums[message]
        buffer.gather()
        stages.start(each.first_phase, partial(_ended, None if each.is_two_phase else buffer.scatter, message, on_done))
        return False

    def start_second_phase(self, message: int, on_done: OnDone) -> bool:
        stages = self._stages[self._next_in_order(message)]
        stages.start(self._sums[message].second_phase, partial(_ended, self._buffers[message].scatter, message, on_done))
        return False


class SumsInStream(_InOrder):
    """Sums over all ranks at once, which take their turn in a stream of the device. One is reported done as soon as it is
    queued, and `join` makes the script's stream wait for it.

    Args:
        plan, buffers, weight: of the messages.
        streams: of the device.
        stream: of the device, for sums alone.
        group_of_part: see `FlatSums`.
        norms: those of the sums; None where tensors have no owners.
    """

    def __init__(
        self,
        plan: Plan,
        buffers: Sequence[MessageBuffer],
        weight: int,
        streams: Streams,
        stream: Stream,
        group_of_part: list[Any],
        norms: Norms | None,
    ) -> None:
        super().__init__(plan, buffers, weight)
        self._streams, self._stream, self._group_of_part, self.norms = streams, stream, group_of_part, norms
        self._end_of_norms: Event | None = None
        self._two_phase = _two_phase_sums(plan, buffers, group_of_part[0])
        self._copies_out = {
            message: _copies_out(plan, message, buffers[message], each) for message, each in self._two_phase.items()
        }
        self._sizes = [buffer.tensor.numel() * buffer.tensor.element_size() for buffer in buffers]
        self._ends: dict[int, Event] = {}
        self._queued: list[int] = []  # messages of this iteration, in the stream's order

    def begin(self, expected: list[list[int]]) -> None:
        super().begin(expected)
        self._queued.clear()
        if self.norms is not None:
            self.norms.begin()

    def so_far(self) -> Event:
        return self._streams.so_far()

    def start(self, message: int, ready: list[Event], on_done: OnDone, on_sent: OnSent) -> bool:
        group = self._group_of_part[self._next_in_order(message)]
        buffer, two_phase, norms = self._buffers[message], self._two_phase.get(message), self.norms
        batch, tells_norms = ([], False) if norms is None else norms.phase_ended(message)

        def queue() -> None:
            buffer.gather()
            if two_phase is None:
                _sum_in_stream(buffer.tensor, group)
            else:
                for work in two_phase.scatter(group):
                    work.wait()
                two_phase.add()
            if two_phase is None or norms is not None:  # with owners, what others own comes again in the second phase
                buffer.scatter()
            if norms is not None:
                norms.compute(batch)
                if tells_norms:
                    norms.tell()
                    _sum_in_stream(norms.memory, group)

        self._ends[message] = self._stream.run(queue, after=ready)
        self._queued.append(message)
        if norms is not None and tells_norms:
            self._end_of_norms, norms.are_there = self._ends[message], True
        return True

    def start_second_phase(self, message: int, on_done: OnDone) -> bool:
        group = self._group_of_part[self._next_in_order(message)]

        def queue() -> None:
            for work in self._two_phase[message].gather(group):
                work.wait()
            self._copies_out[message]()

        self._ends[message] = self._stream.run(queue)
        self._queued.remove(message)  # the second phase ends the sum
        self._queued.append(message)
        return True

    def join(self, message: int) -> None:
        self._streams.join(self._ends[message])

    def join_norms(self) -> None:
        assert self._end_of_norms is not None
        self._streams.join(self._end_of_norms)

    def has_ended(self, message: int) -> bool:
        return self._ends[message].query()

    def ended_with(self, messages: Iterable[int]) -> set[int]:
        """Messages that have ended, or that the stream ends before the last of `messages` or shortly after it."""
        ends = set(messages)
        last = max((place for place, message in enumerate(self._queued) if message in ends), default=-1)
        behind = 0
        for place, message in enumerate(self._queued):
            if place > last:
                behind += self._sizes[message]
            if behind <= _SHORTLY_BYTES or self._ends[message].query():
                ends.add(message)
        return ends

    def not_ended(self) -> frozenset[int]:
        """Messages that are queued on the device and have not ended. Any thread may ask."""
        return frozenset(message for message in list(self._queued) if not _is_over(self._ends[message]))


def _two_phase_sums(plan: Plan, buffers: Sequence[MessageBuffer], group: Any) -> dict[int, TwoPhase | OwnedSum]:
    """The memory of each two-phase message of `plan`, by message, for the ranks of `group`."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    found: dict[int, TwoPhase | OwnedSum] = {}
    for message in plan.second_phases:
        buffer = buffers[message]
        if plan.owners is not UNSET:
            found[message] = OwnedSum(buffer.tensor, part_lengths(plan, message, buffer, world), rank)
        else:
            found[message] = TwoPhase(buffer.tensor, world)
    return found


def _copies_out(plan: Plan, index: int, buffer: MessageBuffer, two_phase: TwoPhase | OwnedSum) -> Callable[[], None]:
    """What brings the sums of a second phase into their slots."""
    if isinstance(two_phase, TwoPhase):
        scatter = buffer.scatter
    else:
        scatter = scatter_of_others(plan, index, buffer, two_phase.rank, two_phase.world)
    return partial(_in_turn, two_phase.copy_out, scatter)


def _all_reduce(tensor: torch.Tensor, group: Any) -> list[Any]:
    return [unrecorded(all_reduce, group, [tensor], _SUM)]  # `dist.all_reduce` does the same after 13 us of checks


def _sum_in_stream(tensor: torch.Tensor, group: Any) -> None:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    work.wait()  # blocks the current stream until the sum is there, not the host


def _in_turn(first: Callable[[], None], then: Callable[[], None]) -> None:
    first()
    then()


def _is_over(event: Event) -> bool:
    try:
        return event.query()
    except RuntimeError:  # the device has failed
        return False


def _ended(then: Callable[[], None] | None, message: int, on_done: OnDone, error: BaseException | None) -> None:
    """The sum is there, unless with an error: do `then`, and tell of the message's end."""
    if error is None and then is not None:
        try:
            then()
        except Exception as raised:  # torch.distributed would drop it
            error = raised
    on_done(message, error)
