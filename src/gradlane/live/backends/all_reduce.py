"""AllReduce: the backend over torch.distributed, one process group a lane, marked where lanes have classes in the network.

It starts sums in the order that it is given and reports each one's end; it decides nothing. The order in
which a rank issues collectives is the order in which they meet on the network, so the last line before
torch.distributed compares each with the agreed order: what would be a wrong sum is an error here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradlane.core.backends import refuse_what_cannot_be_done
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.traffic_class import TrafficClass, traffic_classes
from gradlane.errors import JobError, OrderError, UnsupportedError
from gradlane.live.backends.base import OnDone, OnSent
from gradlane.live.backends.gradient_buffers import MessageBuffer
from gradlane.live.backends.probe import measure
from gradlane.live.backends.process_groups import ProcessGroups
from gradlane.live.backends.sockets import mark_group
from gradlane.live.backends.streams import Event, Streams
from gradlane.live.backends.two_phase import TwoPhase


class AllReduceBackend:
    """Sums of message buffers on `device`, which has `streams` unless it is the CPU.

    On the CPU a sum ends when its bytes have arrived, told by a thread of torch.distributed. On a device with
    streams it ends, for the host, as soon as it is queued: the device runs queued sums one after another
    (so no lane ever has more than one message on the wire), and `join` makes a stream wait for a sum.
    """

    needs_one_order = True
    tells_sends = False

    def __init__(
        self,
        device: torch.device,
        streams: Streams | None,
        group: dist.ProcessGroup | None,
        timeout_s: float,
        weight: int = 1,
    ) -> None:
        """weight: process groups a lane, over which its messages are dealt."""
        self.control_device, self._weight = device, weight
        self._groups = ProcessGroups(group, timeout_s)
        self._marks: list[TrafficClass] = []
        self._open(1)
        self._streams, self.has_streams = streams, streams is not None
        self._stream = None if streams is None else streams.open()
        self._ends: dict[int, Event] = {}
        self._expected: list[list[int]] = []
        self._issued: list[int] = []

    def _open(self, groups: int) -> None:
        while len(self._groups) < groups:
            self._groups.open()
            self._marks.append(TrafficClass())

    def measure(self) -> Network:
        return measure(self.control_group, self.control_device, "measured at attach, all-reduce")

    def prepare(self, plan: Plan, buffers: Sequence[MessageBuffer]) -> None:
        """Take up a plan: a process group a lane (collective: every rank calls it alike).

        Raises `UnsupportedError`, on all ranks, where lanes have classes and a group's connections cannot be marked.
        """
        refuse_what_cannot_be_done(plan, "all-reduce")
        self._open(len(plan.lanes) * self._weight)
        for group, mark in enumerate(traffic_classes(plan) * self._weight):
            if mark != self._marks[group]:
                self._mark(group, mark)
        world = dist.get_world_size(self._groups[0])
        self._halves = {index: TwoPhase(buffers[index].tensor, world) for index in plan.second_phases}
        self._lanes = [message.lane for message in plan.messages]
        self._plan = plan
        self.begin([[] for _ in plan.lanes])

    def _mark(self, group: int, mark: TrafficClass) -> None:
        if self._streams is not None:
            raise UnsupportedError(
                "the plan's lanes ask for classes in the network, which sums of tensors on a device do not have; expected "
                "tensors in CPU memory, or backend='server'"
            )
        mark_group(self._groups[group], self._groups.sockets(group), mark)
        self._marks[group] = mark

    @property
    def control_group(self) -> Any:
        """The first lane's group, for what is exchanged between iterations."""
        return self._groups[0]

    def begin(self, expected: list[list[int]]) -> None:
        """A new iteration: the agreed order of each lane. A coordinator's order grows by `expect`."""
        self._expected = expected
        self._issued = [0] * len(expected)

    def expect(self, message: int) -> None:
        self._expected[self._lanes[message]].append(message)

    def so_far(self) -> Event | None:
        return None if self._streams is None else self._streams.so_far()

    def start(self, message: int, buffer: MessageBuffer, ready: list[Event], on_done: OnDone, on_sent: OnSent) -> bool:
        """Begin the sum of `buffer` over all ranks, in place; of a two-phase message, its reduce-scatter. True if it has ended
        for the host.

        ready: what `so_far` gave when the bytes were there. Raises `OrderError` if `message` is
        not the next of the agreed order.
        """
        group = self._next_in_order(message)
        halves = self._halves.get(message)
        if self._stream is None:
            buffer.gather()
            if halves is None:
                self._tell_end(message, [dist.all_reduce(buffer.tensor, group=group, async_op=True)], buffer.scatter, on_done)
            else:
                self._tell_end(message, halves.scatter(group), halves.add, on_done)
            return False

        def queue() -> None:
            buffer.gather()
            if halves is not None:
                for work in halves.scatter(group):
                    work.wait()
                halves.add()
                return
            work = dist.all_reduce(buffer.tensor, group=group, async_op=True)
            assert work is not None
            work.wait()  # this stream waits for the sum, the host does not
            buffer.scatter()

        self._ends[message] = self._stream.run(queue, after=ready)
        return True

    def start_second_phase(self, message: int, buffer: MessageBuffer, on_done: OnDone) -> bool:
        """Begin the all-gather of a two-phase message. True if it has ended for the host. Raises as `start` does."""
        group, halves = self._next_in_order(message), self._halves[message]

        def take_over() -> None:
            halves.put_back()
            buffer.scatter()

        if self._stream is None:
            self._tell_end(message, halves.gather(group), take_over, on_done)
            return False

        def queue() -> None:
            for work in halves.gather(group):
                work.wait()
            take_over()

        self._ends[message] = self._stream.run(queue)
        return True

    def _next_in_order(self, message: int) -> Any:
        """The group of `message`, which has to be the next that its lane issues."""
        lane = self._lanes[message]
        place, expected = self._issued[lane], self._expected[lane]
        if place >= len(expected) or expected[place] != message:
            wanted = self._plan.describe_message(expected[place]) if place < len(expected) else "nothing"
            raise OrderError(
                f"about to start {self._plan.describe_message(message)} as number {place} of lane {lane}, "
                f"where the agreed order has {wanted}; nothing was sent"
            )
        self._issued[lane] = place + 1
        # what a group gets of the lane's order, it gets in that order on every rank
        return self._groups[lane + len(self._plan.lanes) * (message % self._weight)]

    def _tell_end(self, message: int, works: list[Any], then: Callable[[], None], on_done: OnDone) -> None:
        def ended(error: BaseException | None) -> None:
            if error is None:
                then()
            on_done(message, error)

        self._groups.when_ended(works, ended)

    def join(self, message: int) -> None:
        """On a device: the script's own stream goes on when the sum of `message` is there."""
        if self._streams is not None:
            self._streams.join(self._ends[message])

    def has_ended(self, message: int) -> bool:
        """Whether the sum of `message`, which has ended for the host, is there."""
        return self._streams is None or self._ends[message].query()

    def close(self, failure: JobError | None) -> None:
        """Give the process groups back, unless sums are stuck in them."""
        if failure is None:
            self._groups.close()
