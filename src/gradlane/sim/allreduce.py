"""All-reduce in virtual time: workers driven by the Dispatcher that runs live, and a network that
carries collectives.

A collective begins when the last worker has issued it, and all workers have its sum at once.
Messages are carried as `collectives.py` says. Workers that are all alike do the same at the
same times, so that `simulate` has one of them stand for all, and 2048 cost no more than 2.
`simulate_heterogeneous` simulates each worker: their speeds may differ, their times may vary, and
the network's rate may change.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradlane.core.backends import refuse_what_cannot_be_done
from gradlane.core.cluster import RateStep
from gradlane.core.fields import need, need_int
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.timeline import Timeline
from gradlane.sim.collectives import carrier
from gradlane.sim.fabric import Job
from gradlane.sim.simulation import Simulation
from gradlane.sim.starting import delayed
from gradlane.sim.steady import planned_ahead


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
    return _run(plan, profile, network, [100], iterations)[0]


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
        steps: from each `at_ns` on, large messages pass between hosts at its rate instead of
            `network.between.bytes_per_second`, and others at a rate changed in proportion; startups stay.
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
    return _run(plan, profile, network, percent, iterations, steps, jitter, seed)


def _run(
    plan: Plan,
    profile: Profile,
    network: Network,
    percent: Sequence[int],
    iterations: int,
    steps: Sequence[RateStep] = (),
    jitter: float = 0.0,
    seed: int = 0,
) -> tuple[Timeline, ...]:
    ranks = [(0, each) for each in percent]
    # without two-phase messages nothing is received apart from being sent
    receives = bool(plan.second_phases)
    fabric = carrier(plan, network, len(ranks), lambda message: run.awaits(message), steps)
    run = Simulation([Job(plan, profile)], ranks, fabric, iterations, jitter=jitter, seed=seed, receives=receives)
    (timelines,) = run.run()
    return timelines
