"""AllReduceBackend: sums over torch.distributed, with a process group for each lane.

It opens the groups, measures them and chooses how messages are summed; `all_reduce_sums` sums them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from msgspec import UNSET

from gradlane.core.backends import HIERARCHICAL_PAYS, Algorithm, refuse_what_cannot_be_done
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.traffic_class import TrafficClass, traffic_classes
from gradlane.errors import JobError, UnsupportedError
from gradlane.live.backends.all_reduce_sums import FlatSums, HierarchicalSums, SumsInStream
from gradlane.live.backends.base import Measured
from gradlane.live.backends.gradient_buffers import MessageBuffer
from gradlane.live.backends.hierarchy import Hosts, Stages, hosts_of, levels_of
from gradlane.live.backends.norms import Norms, NormsExchange
from gradlane.live.backends.probe import Probed, measure
from gradlane.live.backends.probe_levels import BlockingSums, in_turns, time_levels
from gradlane.live.backends.process_groups import NewGroups, OnEnd, ProcessGroups, all_reduce, is_gloo, unrecorded
from gradlane.live.backends.sockets import set_traffic_class
from gradlane.live.backends.streams import Streams
from gradlane.units import format_bytes, format_ns

log = logging.getLogger("gradlane")


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
        self._groups.open()
        self._flat = [0]  # for each part of a lane its group
        self._group_of_part: list[Any] = [self._groups[0]]  # as objects; sums of all plans have this list
        self._group_of_norms: int | None = None  # once a plan had owners
        self._stages: list[Stages] = []  # and if sums are hierarchical, its groups
        self._traffic_classes: dict[int, TrafficClass] = {}  # by group, where it is not the usual one
        self._algorithm, self._hosts = algorithm, self._find_hosts(algorithm, on_host=streams is None)
        self.is_hierarchical = algorithm == "hierarchical"
        self.networks: dict[Algorithm, Network] = {}
        """What was measured, or taken over."""
        self._probed: Probed | None = None
        self._streams, self.has_streams = streams, streams is not None
        self._stream = None if streams is None else streams.open(urgent=True)
        self._in_stream: SumsInStream | None = None  # of the plan in force
        self.lost = frozenset[int]()
        if streams is not None:  # NCCL connects in the first collective, which must not be one of a backward pass
            dist.all_reduce(torch.zeros(1, device=device), group=self._groups[0])

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
                self._group_of_part.append(self._groups[self._flat[-1]])

    def measure(self) -> Measured:
        """The network of the algorithm in use (collective)."""
        return Measured({"all-reduce": self.measure_sums()})

    def take_over(self, measured: Measured) -> None:
        """Sum by the algorithm that the network is of."""
        network = measured.networks["all-reduce"]
        assert network.bus is UNSET or self._hosts is not None
        self.is_hierarchical = network.bus is not UNSET
        self.networks["hierarchical" if self.is_hierarchical else "flat"] = network

    def measure_sums(self, budget_s: float = 1.0, source: str = "measured at attach, all-reduce") -> Network:
        """Measure the network of the algorithm in use (collective).

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
        """Measure flat sums once more (collective), after `measure_sums`.

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

    def prepare(self, plan: Plan, buffers: Sequence[MessageBuffer]) -> FlatSums | HierarchicalSums | SumsInStream:
        """Take up a plan, with `weight` process groups for each lane (collective).

        Raises:
            PlanError: it has several lanes, and sums take their turn in a stream.
            UnsupportedError: lanes have traffic classes, which a group's connections cannot be
                given; on all ranks.
        """
        refuse_what_cannot_be_done(plan, "all-reduce", in_stream=self.has_streams)
        parts = len(plan.lanes) * self._weight
        is_hierarchical = self.is_hierarchical and plan.owners is UNSET  # an owner is one of all ranks
        self._open(parts, is_hierarchical)
        for part, traffic_class in enumerate(traffic_classes(plan) * self._weight):
            group = self._stages[part].group_between if is_hierarchical else self._flat[part]
            if traffic_class != self._traffic_classes.get(group, TrafficClass()):
                self._set_traffic_class(group, traffic_class)
        if is_hierarchical:
            assert self._hosts is not None
            return HierarchicalSums(plan, buffers, self._weight, self._stages, self._hosts)
        if self._streams is not None:
            assert self._stream is not None
            norms = None if plan.owners is UNSET else self._norms_of(plan, buffers)
            if norms is not None:  # NCCL connects what `OwnedSum` uses, too
                each = norms.memory.new_zeros(dist.get_world_size(self._groups[0]))
                dist.all_to_all_single(torch.empty_like(each), each, group=self._groups[0])
            self._in_stream = SumsInStream(plan, buffers, self._weight, self._streams, self._stream, self._group_of_part, norms)
            return self._in_stream
        exchange = None if plan.owners is UNSET else self._exchange_of(self._norms_of(plan, buffers))
        return FlatSums(plan, buffers, self._weight, self._groups, self._group_of_part, exchange)

    def _norms_of(self, plan: Plan, buffers: Sequence[MessageBuffer]) -> Norms:
        group = self._groups[0]
        return Norms(plan, buffers, dist.get_rank(group), dist.get_world_size(group))

    def _exchange_of(self, norms: Norms) -> NormsExchange:
        """Exchanges the norms of a plan whose tensors have owners (collective)."""
        if self._group_of_norms is None:
            self._group_of_norms = len(self._groups)
            self._groups.open()
        number = self._group_of_norms

        def begin_sum(norms: torch.Tensor, then: OnEnd) -> None:
            self._groups.when_ended([unrecorded(all_reduce, self._groups[number], [norms])], then)

        return NormsExchange(norms, begin_sum)

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

    def interrupt(self) -> None:
        """The job has failed: end the sums that are stuck in streams, so that what waits for them goes on to the failure."""
        if self._streams is not None and not self._groups.is_aborted:
            self.lost = frozenset() if self._in_stream is None else self._in_stream.not_ended()
            self._groups.abort()

    def close(self, failure: JobError | None) -> None:
        """Destroy the process groups, unless the job failed: then sums are stuck in them
        (`process_groups`).
        """
        if failure is None:
            self._group_of_part.clear()  # old plans' sums are garbage, and may be there for some time
            self._groups.close()
        else:
            self.interrupt()
