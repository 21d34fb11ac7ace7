"""Prediction: what the simulator says of a plan that ran, with what was measured where it ran."""

from __future__ import annotations

from gradlane.core.cluster import Cluster
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.planning.measured import where
from gradlane.planning.questions.sweep import Case, Outcome, judge_plan
from gradlane.sim import few_packets


def predict(plan: Plan, profile: Profile, place: Place | Network | Cluster) -> Outcome:
    """The simulated steady state of `plan` at a place whose network was measured there, or where `measured.where` has that.

    Profile and plan may list the tensors in different orders.
    """
    if plan.tensors != profile.specs:
        profile = profile.in_order_of(plan.tensors)
    simulated = where(place) if isinstance(place, Place) else place
    return judge_plan(plan, Case(profile, simulated, whole=few_packets(profile, simulated)))
