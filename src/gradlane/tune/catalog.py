"""The catalog: the policies of `gradlane.policies`, and `searched`, which needs them and the simulator."""

from __future__ import annotations

from typing import Any

from gradlane import policies
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.core.profile import Profile
from gradlane.core.steps import stepwise
from gradlane.errors import InputError
from gradlane.policies import Executor
from gradlane.policies.prophet import Prophet
from gradlane.tune.searched import Searched


def names(executor: Executor | None = None, apart: bool = False) -> tuple[str, ...]:
    """The names of all policies, or of those that `executor` carries (live, with servers apart); `searched` last."""
    return (*policies.names(executor, apart), Searched.name)


def plan(policy: Policy, profile: Profile, network: Network) -> Plan:
    """What `policy` plans for a profile that was measured: Prophet is shown steps, where no two times are ever equal."""
    return policy.plan(stepwise(profile) if isinstance(policy, Prophet) else profile, network)


def get(name: str, **knobs: Any) -> Policy:
    """The policy of that name with the given knobs. Raises `InputError` naming what exists."""
    if name != Searched.name:
        if name not in policies.names():
            raise InputError(f"policy: got {name!r}, expected one of {', '.join(names())}")
        return policies.get(name, **knobs)
    unknown = sorted(set(knobs) - set(Searched.__struct_fields__))
    if unknown:
        raise InputError(f"policy {name}: got knob {unknown[0]!r}, expected {', '.join(Searched.__struct_fields__)}")
    return Searched(**knobs)
