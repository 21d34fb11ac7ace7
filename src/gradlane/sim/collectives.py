"""Collectives in virtual time: what carries the messages of one job over all-reduce.

A collective begins when the last rank has issued it, and all ranks have its sum at once. Messages
share the network between hosts as `shared_link.py` says; where hosts have several devices,
`hosts.py` puts the stages within hosts around it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from gradlane.core.cluster import Link, RateStep
from gradlane.core.fields import MAX_RATE
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.sim.fabric import Fabric, Notice
from gradlane.sim.hosts import HostFabric
from gradlane.sim.shared_link import SharedLink
from gradlane.units import NS_PER_SECOND


def carrier(plan: Plan, network: Network, ranks: int, steps: Sequence[RateStep] = ()) -> Fabric:
    """What carries the messages of `plan`.

    Args:
        plan: the job's plan.
        network: what messages cost.
        ranks: how many ranks issue collectives: all workers, host by host, or one that stands for
            all.
        steps: as in `allreduce.simulate_heterogeneous`.
    """
    bus = network.bus
    if bus is UNSET:
        return CollectiveFabric(plan, network, ranks, steps)
    host_of = [rank // bus.devices for rank in range(ranks)]
    nominal = network.between.bytes_per_second
    fastest = max(nominal, max((step.bytes_per_second for step in steps), default=0))

    def rate(size_bytes: int) -> int:
        return network.segment_of(size_bytes).bytes_per_second * fastest // nominal

    between = CollectiveFabric(plan, network.between, host_of[-1] + 1, steps)
    stages = (bus.reduce_scatter, bus.all_gather)
    return HostFabric(between, plan, host_of, stages, bus.packet_bytes, rate, collective=True)


class CollectiveFabric:
    """Collectives of one job, which begin when every rank has issued them. A
    `gradlane.sim.fabric.Fabric`.

    A message that is not two-phase is pushed and pulled at once, when its all-reduce ends; of a
    two-phase message the reduce-scatter is the push, and the all-gather the pull.
    """

    def __init__(self, plan: Plan, network: Network, ranks: int, steps: Sequence[RateStep] = ()) -> None:
        """Prepare a network on which nothing is in flight.

        Args:
            plan: the job's plan.
            network: what messages cost between hosts; it has its own number of workers.
            ranks: how many ranks issue collectives: all workers, or one that stands for all.
            steps: as in `simulate_heterogeneous`.
        """
        self.events = 0
        self._plan, self._ranks = plan, range(ranks)
        # a link on which a nanosecond of the network's own rate is a byte, so that times stay exact
        nominal = network.bytes_per_second
        scaled = tuple(
            RateStep(step.at_ns, min(MAX_RATE, max(1, step.bytes_per_second * NS_PER_SECOND // nominal))) for step in steps
        )
        self._link = SharedLink(network, Link(NS_PER_SECOND, scaled) if scaled else None, self._telling_ns)
        self._issued = [0] * len(plan.messages)
        self._tells: dict[int, list[bool]] = {}  # `Notice.pulled` of the notices at the end of a message (or half) in flight
        self._wakeup_ns, self._classes = network.wakeup_ns, network.sharing.network_classes
        self._in_flight: list[dict[int, None]] = [{} for _ in plan.lanes]  # by lane, in the order of their starts
        # by lane, the most urgent last: those that have begun are dropped when they are met
        by_urgency = sorted(range(len(plan.messages)), key=lambda message: -plan.messages[message].priority)
        self._by_urgency = [
            [each for each in by_urgency if plan.messages[each].lane == lane] for lane in range(len(plan.lanes))
        ]
        self._to_begin: list[list[int]] = [[] for _ in plan.lanes]
        self._begun: list[set[int]] = [set() for _ in plan.lanes]  # in this iteration

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
        details = self._plan.messages[message]
        network_class = min(self._plan.lanes[details.lane].network_priority, self._classes - 1)
        self._link.add(now_ns, message, details.size_bytes, network_class, half, details.lane)
        self._in_flight[details.lane][message] = None
        begun = self._begun[details.lane]
        if not begun or len(begun) == len(self._by_urgency[details.lane]):
            begun.clear()
            self._to_begin[details.lane] = self._by_urgency[details.lane].copy()
        begun.add(message)

    def _telling_ns(self, message: int) -> int:
        """What it takes to tell of the end of `message`, as a session asks for it: of the first in flight where
        the next one does not fit into the window; of all where second phases wait for all first ones.

        The next one is taken to be the most urgent that has not begun, whether or not it is ready.
        """
        if self._plan.second_phases:
            return self._wakeup_ns
        lane = self._plan.messages[message].lane
        window, to_begin, in_flight = self._plan.lanes[lane].window_bytes, self._to_begin[lane], self._in_flight[lane]
        while to_begin and to_begin[-1] in self._begun[lane]:
            to_begin.pop()
        if window is None or not to_begin or message != next(iter(in_flight)):
            return 0
        bytes_then = sum(self._plan.messages[each].size_bytes for each in (*in_flight, to_begin[-1]))
        return self._wakeup_ns if bytes_then > window else 0

    def next_ns(self) -> int:
        """`Fabric.next_ns`."""
        return self._link.next_ns()

    def run(self, until_ns: int) -> list[Notice]:
        """`Fabric.run`."""
        while (now_ns := self.next_ns()) <= until_ns:
            self.events += 1
            ended = self._link.run()
            if ended is not None:
                del self._in_flight[self._plan.messages[ended].lane][ended]
                return [Notice(now_ns, rank, ended, pulled) for pulled in self._tells[ended] for rank in self._ranks]
        return []
