"""Collectives in virtual time: what carries the messages of one job over all-reduce.

A collective begins when the last rank has issued it, and all ranks have its sum at once. Messages
share the network between hosts as `shared_link.py` says, or take turns (`one_by_one.py`); where hosts
have several devices, `hosts.py` puts the stages within hosts around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import UNSET

from gradlane.core.cluster import Link, RateStep
from gradlane.core.fields import MAX_RATE, need
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.sim.fabric import Fabric, Notice
from gradlane.sim.hosts import HostFabric
from gradlane.sim.norms import norms_bytes
from gradlane.sim.one_by_one import OneByOne
from gradlane.sim.shared_link import SharedLink
from gradlane.units import NS_PER_SECOND

_NORMS = -1  # the sum of all norms, as a message
_MOST_CHUNKS = 500_000  # of a step's messages: each takes the simulator a microsecond or more

Awaited = Callable[[int], bool]
"""Whether a rank waits for the end of this message, which is in flight, to start another (`Dispatcher.blocking`)."""


def carrier(plan: Plan, network: Network, ranks: int, awaited: Awaited, steps: Sequence[RateStep] = ()) -> Fabric:
    """What carries the messages of `plan`.

    Args:
        plan: the job's plan.
        network: what messages cost.
        ranks: how many ranks issue collectives: all workers, host by host, or one that stands for
            all.
        awaited: asked when the last byte of a message has passed.
        steps: as in `allreduce.simulate_heterogeneous`.
    """
    bus = network.bus
    if bus is UNSET:
        return CollectiveFabric(plan, network, ranks, awaited, steps)
    host_of = [rank // bus.devices for rank in range(ranks)]
    nominal = network.between.bytes_per_second
    fastest = max(nominal, max((step.bytes_per_second for step in steps), default=0))

    def rate(size_bytes: int) -> int:
        return network.segment_of(size_bytes).bytes_per_second * fastest // nominal

    between = CollectiveFabric(plan, network.between, host_of[-1] + 1, awaited, steps)
    stages = (bus.reduce_scatter, bus.all_gather)
    return HostFabric(between, plan, host_of, stages, bus.packet_bytes, rate, collective=True)


class CollectiveFabric:
    """Collectives of one job, which begin when every rank has issued them. A
    `gradlane.sim.fabric.Fabric`.

    A message that is not two-phase is pushed and pulled at once, when its all-reduce ends; of a
    two-phase message the reduce-scatter is the push, and the all-gather the pull.
    """

    def __init__(self, plan: Plan, network: Network, ranks: int, awaited: Awaited, steps: Sequence[RateStep] = ()) -> None:
        """Prepare a network on which nothing is in flight.

        Args:
            plan: the job's plan.
            network: what messages cost between hosts; it has its own number of workers.
            ranks: how many ranks issue collectives: all workers, or one that stands for all.
            awaited: as for `carrier`.
            steps: as in `simulate_heterogeneous`.
        """
        self.events = 0
        self._plan, self._ranks = plan, range(ranks)
        # a link on which a nanosecond of the network's own rate is a byte, so that times stay exact
        nominal = network.bytes_per_second
        scaled = tuple(
            RateStep(step.at_ns, min(MAX_RATE, max(1, step.bytes_per_second * NS_PER_SECOND // nominal))) for step in steps
        )
        self._link: SharedLink | OneByOne
        if network.overlaps or network.wakeup_ns or scaled:
            self._link = SharedLink(network, Link(NS_PER_SECOND, scaled) if scaled else None, self._telling_ns)
        else:
            self._link = OneByOne(network)
        # where tensors have owners: first phases that have not ended, and the last of them while norms are on their way
        self._unreduced, self._last = 0 if plan.owners is UNSET else len(plan.messages), -1
        self._norms_bytes = norms_bytes(plan, network.workers)
        self._issued = [0] * len(plan.messages)
        self._tells: dict[int, list[bool]] = {}  # `Notice.pulled` of the notices at the end of a message (or half) in flight
        self._wakeup_ns, self._awaited = network.wakeup_ns, awaited
        classes = [lane.network_class(network.sharing.network_classes) for lane in plan.lanes]
        self._details = [
            (plan.sum_bytes(index, network.workers), classes[message.lane], message.lane)
            for index, message in enumerate(plan.messages)
        ]
        if network.overlaps:
            chunks = sum(network.sharing.chunks_of(size_bytes) for size_bytes, _, _ in self._details)
            expected = f"a network that sends the {len(plan.messages)} messages of a step in at most {_MOST_CHUNKS} chunks"
            need(chunks <= _MOST_CHUNKS, "sharing.turn_bytes", network.sharing.chunk_bytes, f"{expected}, not {chunks}")

    def hand_over(self, now_ns: int, rank: int, message: int) -> None:
        """`Fabric.hand_over`: a rank issues an all-reduce, or a reduce-scatter."""
        two_phase = self._plan.messages[message].two_phase
        self._issue(now_ns, message, 0 if two_phase else None, [False] if two_phase else [False, True])

    def ask(self, now_ns: int, rank: int, message: int) -> None:
        """`Fabric.ask`: a rank issues the all-gather of a two-phase message."""
        self._issue(now_ns, message, 1, [True])

    def _issue(self, now_ns: int, message: int, half: int | None, tells: list[bool]) -> None:
        self._issued[message] += 1
        if self._issued[message] < len(self._ranks):
            return
        self._issued[message] = 0
        self._tells[message] = tells
        size_bytes, network_class, lane = self._details[message]
        self._link.add(now_ns, message, size_bytes, network_class, half, lane)

    def _telling_ns(self, message: int) -> int:
        """The time of the callback at the completion of `message`. A session asks for it only if another message waits for
        that, or second phases wait for all first ones.
        """
        if not self._wakeup_ns or message == _NORMS:
            return self._wakeup_ns
        return self._wakeup_ns if self._plan.second_phases or self._awaited(message) else 0

    def next_ns(self) -> int:
        """`Fabric.next_ns`."""
        return self._link.next_ns()

    def run(self, until_ns: int) -> list[Notice]:
        """`Fabric.run`."""
        link = self._link
        while (now_ns := link.next_ns()) <= until_ns:
            self.events += 1
            ended = link.run()
            if ended == _NORMS:
                ended, self._unreduced = self._last, len(self._plan.messages)
            elif ended is not None and self._unreduced and not self._tells[ended][0]:
                self._unreduced -= 1
                if not self._unreduced:  # owners tell the norms, and second phases wait for them
                    self._last = ended
                    self._link.add(now_ns, _NORMS, self._norms_bytes, *self._details[ended][1:2])
                    continue
            if ended is not None:
                return [Notice(now_ns, rank, ended, pulled) for pulled in self._tells[ended] for rank in self._ranks]
        return []
