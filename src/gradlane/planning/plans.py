"""Planning: the one way from a policy to a plan. Commands, experiments, searches and live sessions all take it, so that one
profile gives one plan at one place, whoever asks.
"""

from __future__ import annotations

from gradlane.core.backends import refuse_what_cannot_be_done
from gradlane.core.checks import check_plan
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.core.profile import Profile
from gradlane.sim.steady import planned_ahead


def make_plan(policy: Policy, profile: Profile, place: Place) -> Plan:
    """What `policy` plans for `profile` at `place`, ready to be carried out there.

    Raises `PlanError` where the plan does not move every byte of the profile once, or where nothing at `place` can carry it.
    """
    return accepted(policy.plan(profile, place.network), profile, place)


def accepted(plan: Plan, profile: Profile, place: Place) -> Plan:
    """A given plan as `place` carries it out: checked, and with its order fixed ahead where one is needed and it has none.

    profile: with its tensors in the plan's order. Raises as `make_plan` does.
    """
    check_plan(plan, profile.specs)
    refuse_what_cannot_be_done(plan, place.backend, place.has_external_servers)
    if place.needs_sequence and plan.sequence is None:
        plan = planned_ahead(plan, profile, place.network)
    return plan
