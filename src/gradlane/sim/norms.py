"""Norms: what owners tell over parameter servers, in virtual time.

A rank asks for no second phase before the norms are there, but for those with a place in the plan's sequence. Norms leave when
every rank has sent its part of every message, and has the sums of messages of one phase. They take the time of a message each
way on the narrowest link, alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from msgspec import UNSET

from gradlane.core.cluster import Cluster
from gradlane.core.plan import Plan
from gradlane.sim.fabric import FOREVER, Fabric, Notice
from gradlane.units import NS_PER_SECOND


def norms_bytes(plan: Plan, ranks: int) -> int:
    """What owners tell, in bytes: of each tensor two norms, of each rank the factor of the second ones. All are float64."""
    return 8 * (2 * len(plan.tensors) + ranks)


def norms_ns(plan: Plan, cluster: Cluster, ranks: int) -> int:
    """How long the exchange of a plan's norms among the ranks of its job takes, in ns."""
    narrowest = min(link.bytes_per_second for host in cluster.hosts for link in (host.up, host.down))
    packet_ns = 0 if cluster.packet_startup_ns is UNSET else cluster.packet_startup_ns
    bytes_ns = -(-norms_bytes(plan, ranks) * NS_PER_SECOND // narrowest)
    return 2 * (cluster.startup_ns + packet_ns + bytes_ns)


class NormsFabric:
    """A `gradlane.sim.fabric.Fabric` around another one, which carries the messages.

    Args:
        fabric: the other one; it is owned from now on.
        plans: for each job that has owners its plan, which has second phases.
        jobs: for each rank its job.
        took_ns: for each of these jobs the time that its norms take, in ns.
    """

    def __init__(self, fabric: Fabric, plans: Mapping[int, Plan], jobs: Sequence[int], took_ns: Mapping[int, int]) -> None:
        self._fabric, self._plans, self._jobs, self._took_ns = fabric, plans, jobs, took_ns
        self._ends = {job: len(plan.messages) * sum(of == job for of in jobs) for job, plan in plans.items()}
        self._left = dict(self._ends)  # by job: the ends that its norms wait for
        self._unreduced = [len(plans[job].second_phases) if job in plans else 0 for job in jobs]  # by rank
        self._kept: dict[int, list[Notice]] = {job: [] for job in plans}  # of each rank the end of its last first phase
        self._due: list[tuple[int, int]] = []  # exchanges under way: when each ends, and its job
        self.events = 0

    def hand_over(self, now_ns: int, rank: int, message: int) -> None:
        self._fabric.hand_over(now_ns, rank, message)

    def ask(self, now_ns: int, rank: int, message: int) -> None:
        self._fabric.ask(now_ns, rank, message)

    def next_ns(self) -> int:
        return min(self._fabric.next_ns(), self._due[0][0] if self._due else FOREVER)

    def run(self, until_ns: int) -> list[Notice]:
        while True:
            stop_ns = min(until_ns, self._due[0][0] if self._due else FOREVER)
            of_fabric = self._fabric.run(stop_ns)
            self.events = self._fabric.events
            now_ns = of_fabric[0].now_ns if of_fabric else stop_ns
            notices = [told for notice in of_fabric for told in self._told(notice)]
            while self._due and self._due[0][0] <= now_ns:
                _, job = heapq.heappop(self._due)
                notices += [kept._replace(now_ns=now_ns) for kept in self._kept[job]]
                self._kept[job].clear()
            if notices or (not of_fabric and now_ns == until_ns):
                return notices

    def _told(self, notice: Notice) -> list[Notice]:
        """What is told at once: all but the end of a rank's last first phase, which second phases follow."""
        job = self._jobs[notice.rank]
        plan = self._plans.get(job)
        if plan is None or notice.pulled == plan.messages[notice.message].two_phase:
            return [notice]
        self._left[job] -= 1
        if not self._left[job]:
            self._left[job] = self._ends[job]
            heapq.heappush(self._due, (notice.now_ns + self._took_ns[job], job))
        if notice.pulled:
            return [notice]
        self._unreduced[notice.rank] -= 1
        if self._unreduced[notice.rank]:
            return [notice]
        self._unreduced[notice.rank] = len(plan.second_phases)
        self._kept[job].append(notice)
        return []
