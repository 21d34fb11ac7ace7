"""All-reduce in virtual time: workers driven by the Dispatcher that runs live, and a network that
carries collectives.

A collective begins when the last worker has issued it, and all workers have its sum at once.
Messages share the network as `shared_link.py` says. Workers that are all alike do the same at the
same times, so that `simulate` has one of them stand for all, and 2048 cost no more than 2.
`simulate_heterogeneous` simulates each worker: their speeds may differ, their times may vary, and
the network's rate may change.
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
from gradlane.sim.fabric import Job, Notice
from gradlane.sim.shared_link import SharedLink
from gradlane.sim.simulation import Simulation
from gradlane.sim.starting import delayed
from gradlane.sim.steady import planned_ahead
from gradlane.units import NS_PER_SECOND


def simulate(plan: Plan, profile: Profile, network: Network, iterations: int = 3) -> Timeline:
    """Run iterations of a plan among workers that are all alike.

    Args:
        plan: what to carry out; with its order of messages fixed or not.
        profile: one iteration's computation; has the tensors of the plan.
        network: what messages cost.
        iterations: 1 to 10^6.

    Returns:
        What happened, as any rank sees it. An iteration's "step" span runs from the start of its
        forward pass to the start of the next one, so that the last step span is the steady-state
        iteration time. The forward pass after the last iteration is in the timeline too.

    Raises:
        PlanError: all-reduce cannot carry out the plan.
        InputError: the plan is for other tensors than the profile's, or an argument is out of its
            range.
    """
    refuse_what_cannot_be_done(plan, "all-reduce")
    profile = delayed(plan, profile, network.start_ns)
    return _run(plan, profile, CollectiveFabric(plan, network, 1), [100], iterations)[0]


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
    """Run iterations of a plan among workers that differ, on a network that may change.

    Args:
        plan: what to carry out. Where it leaves the order of messages open, `planned_ahead` fixes
            it, because workers that differ must issue collectives in one order.
        profile: one iteration's computation; has the tensors of the plan.
        network: what messages cost, and how many workers there are.
        iterations: 1 to 10^6.
        compute_percent: each worker's compute times in hundredths of the profile's, 1 to 10^6;
            None: 100 each.
        steps: from each `at_ns` on, large messages pass at its rate instead of
            `network.bytes_per_second`, and others at a rate changed in proportion; startups stay.
        jitter: each worker's compute times in each iteration are drawn evenly from 1 - jitter to 1
            + jitter times their length; 0 to below 1.
        seed: of these draws. The result is the same for the same seed.

    Returns:
        A timeline for each worker, as `simulate` has it.

    Raises:
        PlanError: all-reduce cannot carry out the plan.
        InputError: the plan is for other tensors than the profile's, or an argument is out of its
            range.
    """
    refuse_what_cannot_be_done(plan, "all-reduce")
    percent = [100] * network.workers if compute_percent is None else list(compute_percent)
    need(len(percent) == network.workers, "compute_percent", f"{len(percent)} workers", f"{network.workers}")
    for worker in percent:
        need_int("compute_percent", worker, 1, 1_000_000)
    if plan.sequence is None:
        plan = planned_ahead(plan, profile, network)
    profile = delayed(plan, profile, network.start_ns)
    return _run(plan, profile, CollectiveFabric(plan, network, len(percent), steps), percent, iterations, jitter, seed)


def _run(
    plan: Plan,
    profile: Profile,
    fabric: CollectiveFabric,
    percent: Sequence[int],
    iterations: int,
    jitter: float = 0.0,
    seed: int = 0,
) -> tuple[Timeline, ...]:
    ranks = [(0, each) for each in percent]
    # without two-phase messages nothing is received apart from being sent
    receives = bool(plan.second_phases)
    run = Simulation([Job(plan, profile)], ranks, fabric, iterations, jitter=jitter, seed=seed, receives=receives)
    (timelines,) = run.run()
    return timelines


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
            network: what messages cost; it has its own number of workers.
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
        self._link = SharedLink(network, Link(NS_PER_SECOND, scaled) if scaled else None)
        self._issued = [0] * len(plan.messages)
        self._tells: dict[int, list[bool]] = {}  # `Notice.pulled` of the notices at the end of a message (or half) in flight

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
        network_class = self._plan.lanes[details.lane].network_priority
        self._link.add(now_ns, message, details.size_bytes, network_class, half, details.lane)

    def next_ns(self) -> int:
        """`Fabric.next_ns`."""
        return self._link.next_ns()

    def run(self, until_ns: int) -> list[Notice]:
        """`Fabric.run`."""
        while (now_ns := self._link.next_ns()) <= until_ns:
            self.events += 1
            message = self._link.run()
            if message is not None:
                return [Notice(now_ns, rank, message, pulled) for pulled in self._tells[message] for rank in self._ranks]
        return []
