"""The policies, one file a paper, by the name that users type."""

from __future__ import annotations

from typing import Any

from gradlane.core.policy import Policy
from gradlane.errors import InputError
from gradlane.policies.blocks import Blocks
from gradlane.policies.bytescheduler import ByteScheduler
from gradlane.policies.ddp import Ddp
from gradlane.policies.mg_wfbp import MgWfbp
from gradlane.policies.mg_wfbp_exact import MgWfbpExact
from gradlane.policies.p3 import P3
from gradlane.policies.sync_easgd import SyncEasgd
from gradlane.policies.tictac import TicTac
from gradlane.policies.wfbp import Wfbp

_ALL = (Wfbp, Ddp, SyncEasgd, MgWfbp, MgWfbpExact, P3, TicTac, ByteScheduler, Blocks)
_BY_NAME = {policy.name: policy for policy in _ALL}

DEFAULT = Blocks.name


def names() -> tuple[str, ...]:
    """The names of all policies, in the order of `gradlane policies`."""
    return tuple(_BY_NAME)


def get(name: str, **knobs: Any) -> Policy:
    """The policy of that name with the given knobs. Raises `InputError` naming what exists."""
    if name not in _BY_NAME:
        raise InputError(f"policy: got {name!r}, expected one of {', '.join(_BY_NAME)}")
    kind = _BY_NAME[name]
    unknown = sorted(set(knobs) - set(kind.__struct_fields__))
    if unknown:
        known = ", ".join(kind.__struct_fields__) or "none"
        raise InputError(f"policy {name}: got knob {unknown[0]!r}, expected {known}")
    return kind(**knobs)


__all__ = ["DEFAULT", "Policy", "get", "names"]
