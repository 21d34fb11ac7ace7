"""Plans: the one way from a policy to a plan.

Commands, experiments, searches and live sessions all use it, so that one profile gives one plan at
one place.
"""

from __future__ import annotations

from functools import partial

import msgspec
from msgspec import UNSET

from gradlane.core.backends import BUS_KNOWS_NO_OWNERS, refuse_owners_beyond, refuse_what_cannot_be_done
from gradlane.core.checks import check_plan
from gradlane.core.cluster import Cluster
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy, plans_with_bus, trials, wire_over_servers
from gradlane.core.profile import Profile
from gradlane.errors import PlanError
from gradlane.planning.measured import where
from gradlane.sim.servers import simulate_servers
from gradlane.sim.steady import iteration_ns, planned_ahead


def make_plan(policy: Policy, profile: Profile, place: Place, simulated: Network | Cluster | None = None) -> Plan:
    """Plan `profile` with `policy`, ready to be carried out at `place`.

    Args:
        policy: one that leaves a knob to be found (`trials`) is planned with each value, and the fastest plan stays.
        profile, place: what is planned, and for where.
        simulated: what judges those plans; None: what `place` has measured (`measured.where`).

    Raises:
        PlanError: the plan does not move every byte once, or nothing at `place` can carry it.
    """
    tried = [make_plan(each, profile, place) for each in trials(policy)]
    if tried:
        return min(tried, key=partial(took_ns, profile=profile, simulated=simulated or where(place)))
    network = place.network if plans_with_bus(policy) else place.network.path
    plan = policy.plan(profile, network)
    wire = wire_over_servers(policy)
    if place.backend == "server" and wire is not None:
        plan = msgspec.structs.replace(plan, wire=wire)
    return accepted(plan, profile, place)


def took_ns(plan: Plan, profile: Profile, simulated: Network | Cluster, *, whole: bool = False) -> int:
    """The steady-state iteration time in ns; `whole` as for `sim.simulate_servers`."""
    if isinstance(simulated, Network):
        return iteration_ns(plan, profile, simulated)
    return max(
        timeline.iteration_ns()[-1] for timeline in simulate_servers(plan, profile, simulated, iterations=2, whole=whole)
    )


def behind_barrier(plan: Plan) -> Plan:
    """`plan` as a session with `cross_barrier=False` carries it out: the next forward pass waits for all sums."""
    return msgspec.structs.replace(plan, crosses_barrier=False)


def when_clipping(plan: Plan, order: float | None) -> Plan:
    """`plan` as a session carries it out whose script reads all gradients in each step.

    Args:
        plan: the plan.
        order: of their norms, if it reads nothing else: 2 for `clip_grad_norm_` as it is. None: it reads more.
    """
    return plan if plan.tells_norms(order) else behind_barrier(plan)


def accepted(plan: Plan, profile: Profile, place: Place) -> Plan:
    """Check a given plan for `place`, and fix its order if `place` needs one and it has none.

    Args:
        plan: the plan.
        profile: the profile, with its tensors in the plan's order.
        place: where the plan will be carried out.

    Raises:
        PlanError: as `make_plan`.
    """
    check_plan(plan, profile.specs)
    if plan.owners is not UNSET and place.network.bus is not UNSET:
        raise PlanError(
            f"plan {plan.policy}: {BUS_KNOWS_NO_OWNERS}; expected one worker a host, sums over all ranks at once "
            "(algorithm='flat'), or another policy"
        )
    refuse_owners_beyond(plan, place.network.workers)
    refuse_what_cannot_be_done(plan, place.backend, place.has_external_servers, place.in_stream)
    if place.coordinated and plan.early_second_phases:  # rank 0 decides about first phases alone
        plan = msgspec.structs.replace(plan, sequence=None)
    if place.needs_sequence and plan.sequence is None:
        plan = planned_ahead(plan, profile, place.network)
    return plan
