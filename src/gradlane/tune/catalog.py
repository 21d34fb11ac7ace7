"""The catalog: the policies of `gradlane.policies`, and `searched`, which needs them and the simulator."""

from __future__ import annotations

from typing import Any

from gradlane import policies
from gradlane.core.policy import Policy
from gradlane.errors import InputError
from gradlane.policies import Executor
from gradlane.tune.searched import Searched


def names(executor: Executor | None = None, apart: bool = False) -> tuple[str, ...]:
    """The names of all policies, or of those that `executor` carries (live, with servers apart); `searched` last."""
    return (*policies.names(executor, apart), Searched.name)


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
