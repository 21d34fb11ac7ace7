"""Prediction: what the simulator says of a plan that ran, given what was measured where it ran."""

from __future__ import annotations

from gradlane.core.executors import BackendName
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.study.sweep import Case, Outcome, judge_plan
from gradlane.tune.measured import where


def predict(plan: Plan, profile: Profile, network: Network, backend: BackendName, servers: int = 0) -> Outcome:
    """The steady state of `plan` on `profile`, on the network that `backend` measured.

    servers: in processes of their own on hosts of their own; 0: one beside each worker. Profile and plan may list the
    tensors in different orders.
    """
    if plan.tensors != profile.specs:
        profile = profile.in_order_of(plan.tensors)
    return judge_plan(plan, Case(profile, where(network, backend, servers)))
