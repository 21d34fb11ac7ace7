"""AllReduceBackend: sums over torch.distributed, with a process group for each lane.

torch.distributed matches the ranks' collectives by the order in which each rank issues them. So the
last line before it compares each message with the agreed order and raises an error instead of
letting ranks add different messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from msgspec import UNSET

from gradlane.core.backends import HIERARCHICAL_PAYS, Algorithm, refuse_what_cannot_be_done
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.traffic_class import TrafficClass, traffic_classes
from gradlane.errors import JobError, OrderError, UnsupportedError
from gradlane.live.backends.base import OnDone, OnSent
from gradlane.live.backends.gradient_buffers import MessageBuffer
from gradlane.live.backends.hierarchy import HierarchicalSum, Hosts, Stages, hosts_of, levels_of
from gradlane.live.backends.norms import Norms, part_lengths
from gradlane.live.backends.owned_sum import OwnedSum
from gradlane.live.backends.probe import Probed, measure
from gradlane.live.backends.probe_levels import BlockingSums, in_turns, time_levels
from gradlane.live.backends.process_groups import NewGroups, OnEnd, ProcessGroups, UnderWay, is_gloo, unrecorded
from gradlane.live.backends.sockets import set_traffic_class
from gradlane.live.backends.streams import Event, Streams
from gradlane.live.backends.two_phase import TwoPhase
from gradlane.units import format_bytes, format_ns

log = logging.getLogger("gradlane")

_SHORTLY_BYTES = 64 << 10
"""Behind a sum in a stream: an update for each small tensor costs the host more than to wait for so much."""


class AllReduceBackend:
    """A `Backend` over torch.distributed; its methods are documented there.

    On the CPU a thread of torch.distributed reports a sum done when its bytes have arrived. NCCL's sums
    take their turn in a stream of the device: one is reported done as soon as it is queued, and `join`
    makes the script's stream wait for it. Plans have one lane there, with one communicator: two could
    wait for each other, since nothing fixes the order in which ranks start messages of two lanes. The
    lane's messages run one after another in the agreed order, so that no more than one is ever on the
    wire, whatever its window.

    Args:
        device: that the message buffers are on.
        streams: of `device`, if sums take their turn in them; None for the CPU.
        new_groups: makes process groups over the ranks of the job.
        timeout_s: seconds after which torch.distributed fails a sum.
        weight: process groups per lane, 1 or more; the lane's messages are dealt over them.
        dtype: in which most gradients travel, for `measure`.
        algorithm: "flat" sums over all ranks at once, "hierarchical" within hosts first
            (`hierarchy`). None: `measure` chooses between the two where hosts have several ranks, and
            without it sums are flat.

    Raises:
        UnsupportedError: the ranks cannot sum hierarchically, and `algorithm` says so; on all ranks.
    """

    needs_one_order = True
    tells_sends = False

    def __init__(
        self,
        device: torch.device,
        streams: Streams | None,
        new_groups: NewGroups,
        timeout_s: float,
        weight: int = 1,
        dtype: torch.dtype = torch.float32,
        algorithm: Algorithm | None = "flat",
    ) -> None:
        self.control_device, self._weight, self._dtype = device, weight, dtype
        self._groups = ProcessGroups(new_groups, timeout_s)
        self._sum = dist.AllreduceOptions()  # a sum, where nothing else is said
        self._groups.open()
        self._flat = [0]  # for each part of a lane its group
        self._group_of_part: list[Any] = []  # as objects
        self._group_of_norms: int | None = None  # once a plan had owners
        self.norms: Norms | None = None
        self._stages: list[Stages] = []  # and if sums are hierarchical, its groups
        self._traffic_classes: dict[int, TrafficClass] = {}  # by group, where it is not the usual one
        self._algorithm, self._hosts = algorithm, self._find_hosts(algorithm, on_host=streams is None)
        self.is_hierarchical = algorithm == "hierarchical"
        self.networks: dict[Algorithm, Network] = {}
        """What `measure` has measured."""
        self._probed: Probed | None = None
        self._streams, self.has_streams = streams, streams is not None
        self._stream = None if streams is None else streams.open(urgent=True)
        self._ends: dict[int, Event] = {}
        self._queued: list[int] = []  # messages of this iteration, in the stream's order
        self.lost = frozenset[int]()
        if streams is not None:  # NCCL connects in the first collective, which must not be one of a backward pass
            dist.all_reduce(torch.zeros(1, device=device), group=self._groups[0])
        self._expected: list[list[int]] = []
        self._issued: list[int] = []
        self._tells_at_once = True
        self._untold: dict[int, UnderWay] = {}  # messages whose ends are not told by themselves
        self._awaited: set[int] = set()

    def _find_hosts(self, algorithm: Algorithm | None, on_host: bool) -> Hosts | None:
        """Where the ranks are, if they can sum hierarchically and may (collective)."""
        group = self._groups[0]
        world, can = dist.get_world_size(group), on_host and is_gloo(group, self.control_device)
        hosts = hosts_of(group) if can and world > 3 and algorithm != "flat" else None
        found = None if hosts is None else levels_of(hosts, dist.get_rank(group))
        if algorithm == "hierarchical" and found is None:
            raise UnsupportedError(
                f"algorithm: got 'hierarchical' for {world} ranks on {self.control_device.type}, whose hosts are "
                f"{hosts or 'not looked at'}, expected Gloo on the CPU, and several hosts of two or more ranks each, equally "
                "many; NCCL sums so by itself"
            )
        return found

    def _open(self, parts: int, is_hierarchical: bool) -> None:
        """Open groups for an algorithm until there are those of `parts` parts of lanes (collective)."""
        if is_hierarchical:
            assert self._hosts is not None
            while len(self._stages) < parts:
                self._stages.append(Stages(self._groups, self._hosts))
        else:
            while len(self._flat) < parts:
                self._flat.append(len(self._groups))
                self._groups.open()

    def measure(self, budget_s: float = 1.0, source: str = "measured at attach, all-reduce") -> Network:
        """Measure the network of the algorithm in use (collective). See `Backend.measure`.

        Where both may be used, measure both, sum equal messages by each in turns, and stay with the
        faster one. The network of hierarchical sums has a bus.

        Args:
            budget_s: see `probe.sweep`.
            source: of the network.
        """
        group = self.control_group
        if self._algorithm != "hierarchical":
            self._fit(measure(group, self.control_device, self._dtype, budget_s=budget_s), source)
        if self._hosts is None:
            return self.networks["flat"]
        if not self._stages:
            self._stages.append(Stages(self._groups, self._hosts))
        levels = time_levels(self._stages[0], group, self._dtype, budget_s)
        self.networks["hierarchical"] = levels.network(f"{source} within hosts first")
        if self._algorithm is None:
            self.is_hierarchical = self._pays(max(size_bytes for size_bytes, _ in levels.between))
        return self.networks["hierarchical" if self.is_hierarchical else "flat"]

    def measure_again(self, budget_s: float, source: str) -> Network:
        """Measure flat sums once more (collective), after `measure`.

        Returns:
            The network of all measurements so far, which says more of a long run than the first.
        """
        assert self._probed is not None
        later = measure(self.control_group, self.control_device, self._dtype, budget_s=budget_s)
        return self._fit(self._probed.and_later(later), source)

    def _fit(self, probed: Probed, source: str) -> Network:
        """Keep what was measured of flat sums, and the network that it tells of (collective)."""
        self._probed = probed
        network = self.networks["flat"] = probed.network(self.control_group, self.control_device, source)
        return network

    def sum_and_wait(self, data: torch.Tensor) -> None:
        """Sum a tensor by the algorithm in use, in place (collective). Nothing may be under way."""
        if self.is_hierarchical:
            self._open(1, is_hierarchical=True)
            BlockingSums(self._stages[0]).sum(data)
        else:
            dist.all_reduce(data, group=self.control_group)

    def _pays(self, size_bytes: int) -> bool:
        """Whether hierarchical sums of such messages take less time (collective); the same on all ranks."""
        flat_ns, hierarchical_ns = in_turns(self._stages[0], self.control_group, self._dtype, size_bytes)
        pays = hierarchical_ns * HIERARCHICAL_PAYS < flat_ns
        if dist.get_rank(self.control_group) == 0:
            chosen = "hierarchical" if pays else "flat"
            times = f"of {format_bytes(size_bytes)}: hierarchical {format_ns(hierarchical_ns)}, flat {format_ns(flat_ns)}"
            log.info("gradlane: %s sums over torch.distributed (%s)", chosen, times)
        return pays

    def prepare(self, plan: Plan, buffers: Sequence[MessageBuffer]) -> None:
        """Take up a plan, with `weight` process groups for each lane (collective).

        Raises:
            PlanError: it has several lanes, and sums take their turn in a stream.
            UnsupportedError: lanes have traffic classes, which a group's connections cannot be
                given; on all ranks.
        """
        refuse_what_cannot_be_done(plan, "all-reduce", in_stream=self.has_streams)
        self._sizes = [buffer.tensor.numel() * buffer.tensor.element_size() for buffer in buffers]
        parts = len(plan.lanes) * self._weight
        is_hierarchical = self.is_hierarchical and plan.owners is UNSET  # an owner is one of all ranks
        self._open(parts, is_hierarchical)
        for part, traffic_class in enumerate(traffic_classes(plan) * self._weight):
            group = self._stages[part].group_between if is_hierarchical else self._flat[part]
            if traffic_class != self._traffic_classes.get(group, TrafficClass()):
                self._set_traffic_class(group, traffic_class)
        world = dist.get_world_size(self._groups[0])
        two_phase = set(plan.second_phases)
        self._two_phase: dict[int, TwoPhase | OwnedSum] = {}
        self._hierarchical: dict[int, HierarchicalSum] = {}
        self.norms = None
        if self._hosts is not None and is_hierarchical:
            for index, buffer in enumerate(buffers):
                self._hierarchical[index] = HierarchicalSum(buffer.tensor, self._hosts, index in two_phase)
        elif plan.owners is not UNSET:
            self._take_up_owners(plan, buffers)
        else:
            self._two_phase = {index: TwoPhase(buffers[index].tensor, world) for index in two_phase}
        self._group_of_part = [self._groups[group] for group in self._flat]
        self._lanes = [message.lane for message in plan.messages]
        self._plan = plan
        # Second phases start when all first ones have ended. Groups of one lane end messages in no order, so that
        # which of them makes room first is not known. A thread that waits for norms awaits no message.
        self._tells_at_once = bool(two_phase) or self.norms is not None or (self._weight > 1 and plan.has_windows)
        self.begin([[] for _ in plan.lanes])

    def _take_up_owners(self, plan: Plan, buffers: Sequence[MessageBuffer]) -> None:
        """Take up a plan whose tensors have owners (collective)."""
        rank, world = dist.get_rank(self._groups[0]), dist.get_world_size(self._groups[0])
        for index in plan.second_phases:
            lengths = part_lengths(plan, index, buffers[index], world)
            self._two_phase[index] = OwnedSum(buffers[index].tensor, lengths, rank)
        if self._group_of_norms is None:
            self._group_of_norms = len(self._groups)
            self._groups.open()
        group_of_norms = self._groups[self._group_of_norms]

        def begin_sum(norms: torch.Tensor, then: OnEnd) -> None:
            self._groups.when_ended([unrecorded(group_of_norms.allreduce, [norms])], then)

        self.norms = Norms(plan, buffers, rank, world, begin_sum)

    def _set_traffic_class(self, group: int, traffic_class: TrafficClass) -> None:
        if self._streams is not None:
            raise UnsupportedError(
                "the plan's lane asks for a class in the network, which NCCL's connections do not have; expected a process "
                "group with Gloo, or backend='server'"
            )
        set_traffic_class(self._groups[group], self._groups.sockets(group), traffic_class)
        self._traffic_classes[group] = traffic_class

    @property
    def control_group(self) -> Any:
        """The first lane's group, which is idle between iterations."""
        return self._groups[0]

    def carry_out(self, keeps_log: bool, on_failure: Callable[[JobError], None]) -> None:
        """Nobody does: torch.distributed starts each collective when it is told to."""

    def begin(self, expected: list[list[int]]) -> None:
        """An iteration begins, with the agreed order of each lane; a coordinator appends to it with
        `expect`.
        """
        self._expected = expected
        self._issued = [0] * len(expected)
        self._awaited.clear()
        self._queued.clear()
        if self.norms is not None:
            self.norms.begin()

    def expect(self, message: int) -> None:
        self._expected[self._lanes[message]].append(message)

    def so_far(self) -> Event | None:
        return None if self._streams is None else self._streams.so_far()

    def start(self, message: int, buffer: MessageBuffer, ready: list[Event], on_done: OnDone, on_sent: OnSent) -> bool:
        """Begin the all-reduce of `buffer`, in place; of a two-phase message, its reduce-scatter.
        See `Backend.start`.

        Raises:
            OrderError: `message` is not the next in its lane's agreed order; nothing was sent.
        """
        part = self._next_in_order(message)
        two_phase, hierarchical = self._two_phase.get(message), self._hierarchical.get(message)
        if hierarchical is not None:
            buffer.gather()
            then = None if hierarchical.is_two_phase else buffer.scatter
            self._stages[part].start(hierarchical.first_phase, partial(_ended, then, message, on_done))
            return False
        group = self._group_of_part[part]
        if self._stream is None:
            if buffer.is_copy:
                buffer.gather()
            if self.norms is not None:
                on_done = self.norms.once_there(on_done)
            if two_phase is None:
                # `dist.all_reduce` does the same after 13 us of checks
                then = buffer.scatter if buffer.is_copy else None
                self._report_end(message, [unrecorded(group.allreduce, [buffer.tensor], self._sum)], then, on_done)
            elif self.norms is None:
                self._report_end(message, unrecorded(two_phase.scatter, group), two_phase.add, on_done)
            else:

                def keep_own() -> None:
                    two_phase.add()
                    buffer.scatter()  # what others own comes again in the second phase

                self._report_end(message, unrecorded(two_phase.scatter, group), keep_own, on_done)
            return False

        def queue() -> None:
            buffer.gather()
            if two_phase is not None:
                for work in two_phase.scatter(group):
                    work.wait()
                two_phase.add()
                return
            work = dist.all_reduce(buffer.tensor, group=group, async_op=True)
            assert work is not None
            work.wait()  # blocks this stream until the sum is there, not the host
            buffer.scatter()

        self._ends[message] = self._stream.run(queue, after=ready)
        self._queued.append(message)
        return True

    def start_second_phase(self, message: int, buffer: MessageBuffer, on_done: OnDone) -> bool:
        """Begin the all-gather of a two-phase message. Returns and raises as `start` does."""
        part, hierarchical = self._next_in_order(message), self._hierarchical.get(message)
        if hierarchical is not None:
            self._stages[part].start(hierarchical.second_phase, partial(_ended, buffer.scatter, message, on_done))
            return False
        group, two_phase = self._group_of_part[part], self._two_phase[message]

        def finish() -> None:
            two_phase.copy_out()
            buffer.scatter()

        if self._stream is None:
            self._report_end(message, unrecorded(two_phase.gather, group), finish, on_done)
            return False

        def queue() -> None:
            for work in two_phase.gather(group):
                work.wait()
            finish()

        self._ends[message] = self._stream.run(queue)
        self._queued.remove(message)  # the second phase ends the sum
        self._queued.append(message)
        return True

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
        return lane + len(self._plan.lanes) * (message % self._weight)

    def _report_end(self, message: int, works: list[Any], then: Callable[[], None] | None, on_done: OnDone) -> None:
        begun = UnderWay(self._groups, works, partial(_ended, then, message, on_done))
        if self._tells_at_once or message in self._awaited:
            begun.tell()
        else:
            self._untold[message] = begun

    def look(self) -> None:
        """Tell of the sums that have ended, up to the first that has not."""
        while self._untold:
            message, begun = next(iter(self._untold.items()))
            if not begun.tell_if_ended():
                return
            del self._untold[message]

    def await_ends(self, messages: Iterable[int]) -> None:
        """Tell of the ends of `messages` when they are there, of this iteration."""
        for message in messages:
            self._awaited.add(message)
            begun = self._untold.pop(message, None)
            if begun is not None:
                begun.tell()

    def join(self, message: int) -> None:
        """Make the script's stream wait for the sum of `message`; nothing to do on the CPU."""
        if self._streams is not None:
            self._streams.join(self._ends[message])

    def has_ended(self, message: int) -> bool:
        """Whether the sum of `message`, which was reported done, is there."""
        return self._streams is None or self._ends[message].query()

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

    def interrupt(self) -> None:
        """The job has failed: end the sums that are stuck in streams, so that what waits for them goes on to the failure."""
        if self._streams is not None and not self._groups.is_aborted:
            self.lost = frozenset(message for message in list(self._queued) if not _is_over(self._ends[message]))
            self._groups.abort()

    def close(self, failure: JobError | None) -> None:
        """Destroy the process groups, unless the job failed: then sums are stuck in them
        (`process_groups`).
        """
        if failure is None:
            self._group_of_part = []
            self._groups.close()
        else:
            self.interrupt()


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
