"""Plans: the one way from a policy to a plan.

Commands, experiments, searches and live sessions all use it, so that one profile gives one plan at
one place.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from gradlane.core.backends import BUS_KNOWS_NO_OWNERS, refuse_owners_beyond, refuse_what_cannot_be_done
from gradlane.core.checks import check_plan
from gradlane.core.cluster import Cluster
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Lane, Message, Plan, Slice
from gradlane.core.policy import Policy, plans_with_bus, trials, wire_over_servers
from gradlane.core.profile import Profile
from gradlane.errors import GradlaneError, InputError, PlanError
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
    tried = trials(policy)
    if any(trials(each) for each in tried):
        raise PlanError(f"policy {policy.name}: trials() got a policy that has trials itself, expected none with any")
    if tried:
        plans = [make_plan(each, profile, place) for each in tried]
        return min(plans, key=partial(took_ns, profile=profile, simulated=simulated or where(place)))
    network = place.network if plans_with_bus(policy) else place.network.path
    with _naming(policy):
        plan = _planned(policy, profile, network)
        wire = wire_over_servers(policy)
        if place.backend == "server" and wire is not None:
            plan = msgspec.structs.replace(plan, wire=wire)
        return accepted(plan, profile, place)


@contextmanager
def _naming(policy: Policy) -> Iterator[None]:
    """Let an error about a plan name the policy that has made it."""
    try:
        yield
    except InputError as error:
        if type(error) not in (InputError, PlanError) or str(error).startswith(("policy ", "plan ")):
            raise
        raise type(error)(f"policy {policy.name}: {error}") from error


def _planned(policy: Policy, profile: Profile, network: Network) -> Plan:
    """What the policy returns, which is a user's own code.

    Raises:
        PlanError: it raises an error that is not gradlane's, or returns something else than a plan of its own for `profile`.
    """
    try:
        plan: Any = policy.plan(profile, network)
    except GradlaneError:
        raise
    except (Exception, SystemExit) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = "expected plan(self, profile, network)" if at.filename == __file__ else f"{at.filename}:{at.lineno}"
        raise PlanError(f"policy {policy.name}: plan() raised {type(error).__name__}: {error} ({where})") from error
    if not isinstance(plan, Plan):
        raise PlanError(f"policy {policy.name}: plan() returned {type(plan).__name__}, expected a gradlane.core.plan.Plan")
    for field, value, is_one, needed in (
        ("tensors", plan.tensors, isinstance(plan.tensors, tuple), "a tuple of TensorSpecs"),
        ("messages", plan.messages, isinstance(plan.messages, tuple), "a tuple of Messages"),
        ("lanes", plan.lanes, _are_lanes(plan.lanes), "a tuple of gradlane.core.plan.Lanes"),
        ("sequence", plan.sequence, plan.sequence is None or isinstance(plan.sequence, tuple), "a tuple of ints, or None"),
        ("crosses_barrier", plan.crosses_barrier, isinstance(plan.crosses_barrier, bool), "True or False"),
    ):
        if not is_one:
            raise PlanError(f"policy {policy.name}: its plan's {field} is {value!r:.60}, expected {needed}")
    for index, message in enumerate(plan.messages):
        if not isinstance(message, Message) or not all(isinstance(piece, Slice) for piece in message.slices):
            raise PlanError(
                f"policy {policy.name}: messages[{index}] is {message!r}, expected a gradlane.core.plan.Message of Slices"
            )
    for what, got, expected in (("policy", plan.policy, policy.name), ("model", plan.model, profile.model)):
        if got != expected:
            raise PlanError(f"policy {policy.name}: its plan's {what} is {got!r}, expected {expected!r}")
    return plan


def _are_lanes(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(lane, Lane) for lane in value)


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
            "(algorithm='flat'; where a cluster is described, --flat), or another policy"
        )
    refuse_owners_beyond(plan, place.network.workers)
    refuse_what_cannot_be_done(plan, place.backend, place.has_external_servers, place.in_stream)
    if place.coordinated and plan.early_second_phases:  # rank 0 decides about first phases alone
        plan = msgspec.structs.replace(plan, sequence=None)
    if place.needs_sequence and plan.sequence is None:
        plan = planned_ahead(plan, profile, place.network)
    return plan
