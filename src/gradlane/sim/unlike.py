"""All-reduce in virtual time where workers are unlike, their times vary, or the network's rate changes.

A collective begins when the last worker has issued it, and all workers have its sum at once. Workers issue in the
plan's order, which is fixed ahead where the plan leaves it open. Where nothing varies, `simulate` says the same and
costs one worker.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from gradlane.core.checking import need, need_int
from gradlane.core.cluster import Link, Step
from gradlane.core.network import MAX_RATE, Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.timeline import Timeline
from gradlane.sim.allreduce import planned_ahead
from gradlane.sim.fabric import FOREVER, Job, Notice
from gradlane.sim.simulation import Simulation
from gradlane.units import NS_PER_SECOND


def simulate_unlike(
    plan: Plan,
    profile: Profile,
    network: Network,
    iterations: int = 3,
    *,
    compute_percent: Sequence[int] | None = None,
    steps: Sequence[Step] = (),
    jitter: float = 0.0,
    seed: int = 0,
) -> tuple[Timeline, ...]:
    """Run `iterations` iterations and return a timeline for each of the network's workers. The same for the same `seed`.

    compute_percent: each worker's compute times in hundredths of the profile's (None: 100 each). steps: from each
    `at_ns` on, large messages pass at its rate instead of `network.bytes_per_second`, and others at a rate changed
    in proportion; startups stay. jitter: as in `simulate_jobs`.
    """
    percent = [100] * network.workers if compute_percent is None else list(compute_percent)
    need(len(percent) == network.workers, "compute_percent", f"{len(percent)} workers", f"{network.workers}")
    for worker in percent:
        need_int("compute_percent", worker, 1, 1_000_000)
    if plan.sequence is None:
        plan = planned_ahead(plan, profile, network)
    job = Job(plan, profile)
    fabric = _CollectiveFabric(plan, network, tuple(steps))
    (timelines,) = Simulation([job], [(0, each) for each in percent], fabric, iterations, jitter=jitter, seed=seed).run()
    return timelines


class _Collective:
    """A message, or half of one, that every worker has issued: what of it is left to carry."""

    __slots__ = ("bytes_ns", "is_first", "is_last", "message", "startup_ns")

    def __init__(self, message: int, startup_ns: int, bytes_ns: int, is_first: bool, is_last: bool) -> None:
        self.message, self.startup_ns, self.bytes_ns = message, startup_ns, bytes_ns
        self.is_first, self.is_last = is_first, is_last


class _CollectiveFabric:
    """One collective at a time, the most urgent class (or, on a packet-priority wire, message) first."""

    def __init__(self, plan: Plan, network: Network, steps: tuple[Step, ...]) -> None:
        self.events = 0
        self._plan, self._network = plan, network
        # a link on which a nanosecond of the network's own rate is a byte, so that without steps times stay exact
        nominal = network.bytes_per_second
        self._pace = Link(
            NS_PER_SECOND,
            tuple(Step(s.at_ns, min(MAX_RATE, max(1, s.bytes_per_second * NS_PER_SECOND // nominal))) for s in steps),
        )
        self._issued = [0] * len(plan.messages)
        self._queue: list[tuple[int, int, int, _Collective]] = []  # (class, priority on the wire, number, what)
        self._numbers = 0
        self._now_ns = 0  # up to which the head of the queue has been carried

    def hand_over(self, now_ns: int, rank: int, message: int) -> None:
        self._issue(now_ns, message, is_first=True, is_last=not self._plan.messages[message].split)

    def ask(self, now_ns: int, rank: int, message: int) -> None:
        self._issue(now_ns, message, is_first=False, is_last=True)

    def _issue(self, now_ns: int, message: int, is_first: bool, is_last: bool) -> None:
        self._issued[message] += 1
        if self._issued[message] < self._network.workers:
            return
        self._issued[message] = 0
        self._carry(now_ns)
        details = self._plan.messages[message]
        piece = next(p for p in self._network.pieces if details.size_bytes <= p.up_to_bytes)
        cost_ns, startup_ns = piece.cost_ns(details.size_bytes), piece.startup_ns
        if details.split:
            cost_ns, startup_ns = (part // 2 if is_first else part - part // 2 for part in (cost_ns, startup_ns))
        urgency = details.priority if self._plan.wire == "packet-priority" else 0
        collective = _Collective(message, startup_ns, cost_ns - startup_ns, is_first, is_last)
        heapq.heappush(self._queue, (self._plan.lanes[details.lane].network_priority, urgency, self._numbers, collective))
        self._numbers += 1

    def next_ns(self) -> int:
        if not self._queue:
            return FOREVER
        head = self._queue[0][3]
        return self._pace.finish_ns(self._now_ns + head.startup_ns, head.bytes_ns)

    def run(self, until_ns: int) -> list[Notice]:
        ends_ns = self.next_ns()
        if ends_ns > until_ns:
            return []
        self.events += 1
        ended = heapq.heappop(self._queue)[3]
        self._now_ns = ends_ns
        told = [pulled for pulled, tells in ((False, ended.is_first), (True, ended.is_last)) if tells]
        return [Notice(ends_ns, rank, ended.message, pulled) for pulled in told for rank in range(self._network.workers)]

    def _carry(self, now_ns: int) -> None:
        """Let time pass to `now_ns`, by which the head of the queue has not ended."""
        if self._queue:
            head, begun_ns = self._queue[0][3], self._now_ns
            waited_ns = min(head.startup_ns, now_ns - begun_ns)
            head.startup_ns -= waited_ns
            begun_ns += waited_ns
            while begun_ns < now_ns:
                rate, changes_ns = self._pace.at(begun_ns)
                until_ns = now_ns if changes_ns is None else min(now_ns, changes_ns)
                head.bytes_ns -= rate * (until_ns - begun_ns) // NS_PER_SECOND
                begun_ns = until_ns
        self._now_ns = now_ns
