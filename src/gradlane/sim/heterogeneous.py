"""All-reduce in virtual time where workers are unlike, their times vary, or the network's rate changes.

A collective begins when the last worker has issued it, and all workers have its sum at once. Workers issue in the
plan's order, which is fixed ahead where the plan leaves it open. Where nothing varies, `simulate` says the same and
costs one worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradlane.core.backends import refuse_what_cannot_be_done
from gradlane.core.cluster import Link, RateStep
from gradlane.core.fields import need, need_int
from gradlane.core.network import MAX_RATE, Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.timeline import Timeline
from gradlane.sim.allreduce import planned_ahead
from gradlane.sim.fabric import Job, Notice
from gradlane.sim.shared_link import SharedLink
from gradlane.sim.simulation import Simulation
from gradlane.units import NS_PER_SECOND


def simulate_heterogeneous(
    plan: Plan,
    profile: Profile,
    network: Network,
    iterations: int = 3,
    *,
    compute_percent: Sequence[int] | None = None,
    steps: Sequence[RateStep] = (),
    jitter: float = 0.0,
    seed: int = 0,
) -> tuple[Timeline, ...]:
    """Run `iterations` iterations and return a timeline for each of the network's workers. The same for the same `seed`.

    compute_percent: each worker's compute times in hundredths of the profile's (None: 100 each). steps: from each
    `at_ns` on, large messages pass at its rate instead of `network.bytes_per_second`, and others at a rate changed
    in proportion; startups stay. jitter: as in `simulate_jobs`. Raises `PlanError` for a plan that all-reduce cannot carry out.
    """
    refuse_what_cannot_be_done(plan, "all-reduce")
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


class _CollectiveFabric:
    """Collectives that begin when every worker has issued them, as `Turns` carries them."""

    def __init__(self, plan: Plan, network: Network, steps: tuple[RateStep, ...]) -> None:
        self.events = 0
        self._plan, self._workers = plan, network.workers
        # a link on which a nanosecond of the network's own rate is a byte, so that without steps times stay exact
        nominal = network.bytes_per_second
        pace = Link(
            NS_PER_SECOND,
            tuple(RateStep(s.at_ns, min(MAX_RATE, max(1, s.bytes_per_second * NS_PER_SECOND // nominal))) for s in steps),
        )
        self._turns = SharedLink(network, pace)
        self._issued = [0] * len(plan.messages)
        self._tells: dict[int, list[bool]] = {}  # of a message (or half) under way: whether sent, summed or both when it ends

    def hand_over(self, now_ns: int, rank: int, message: int) -> None:
        self._issue(now_ns, message, is_first=True, is_last=not self._plan.messages[message].two_phase)

    def ask(self, now_ns: int, rank: int, message: int) -> None:
        self._issue(now_ns, message, is_first=False, is_last=True)

    def _issue(self, now_ns: int, message: int, is_first: bool, is_last: bool) -> None:
        self._issued[message] += 1
        if self._issued[message] < self._workers:
            return
        self._issued[message] = 0
        details = self._plan.messages[message]
        half = None if not details.two_phase else 0 if is_first else 1
        self._tells[message] = [pulled for pulled, tells in ((False, is_first), (True, is_last)) if tells]
        network_class = self._plan.lanes[details.lane].network_priority
        self._turns.add(now_ns, message, details.size_bytes, network_class, half, details.lane)

    def next_ns(self) -> int:
        return self._turns.next_ns()

    def run(self, until_ns: int) -> list[Notice]:
        while (now_ns := self._turns.next_ns()) <= until_ns:
            self.events += 1
            message = self._turns.run()
            if message is not None:
                ranks = range(self._workers)
                return [Notice(now_ns, rank, message, pulled) for pulled in self._tells[message] for rank in ranks]
        return []
