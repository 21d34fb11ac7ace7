"""The policies, one file for each paper, by the name that users type."""

from __future__ import annotations

from typing import Any

from gradlane.core.backends import BackendName
from gradlane.core.fields import did_you_mean
from gradlane.core.policy import Policy
from gradlane.errors import InputError
from gradlane.policies.blocks import Blocks
from gradlane.policies.bytescheduler import ByteScheduler
from gradlane.policies.ddp import Ddp
from gradlane.policies.dear import Dear
from gradlane.policies.geryon import Geryon
from gradlane.policies.mercury import Mercury
from gradlane.policies.mercury_no_preemption import MercuryNoPreemption
from gradlane.policies.mg_wfbp import MgWfbp
from gradlane.policies.mg_wfbp_exact import MgWfbpExact
from gradlane.policies.owners import Owners
from gradlane.policies.p3 import P3
from gradlane.policies.prophet import Prophet
from gradlane.policies.sync_easgd import SyncEasgd
from gradlane.policies.tictac import TicTac
from gradlane.policies.wfbp import Wfbp

_ALL = (
    *(Wfbp, Ddp, SyncEasgd, MgWfbp, MgWfbpExact, P3, TicTac, ByteScheduler, Blocks),
    *(Prophet, Geryon, Mercury, MercuryNoPreemption, Dear, Owners),
)
# plans with a packet wire (`core.backends`)
_CANNOT: dict[BackendName, frozenset[str]] = {
    "all-reduce": frozenset({Mercury.name, MercuryNoPreemption.name}),
    "server": frozenset(),
}
# two-phase plans: live servers in processes of their own return a sum as soon as it is whole
_CANNOT_EXTERNAL = frozenset({Dear.name, Owners.name})
# tensors whose owner is one of all ranks
_CANNOT_WITH_BUS = frozenset({Owners.name})
_BY_NAME = {policy.name: policy for policy in _ALL}

# over servers, Mercury's packets do what blocks do over all-reduce, without waiting for a block's
# return
_DEFAULTS: dict[BackendName, str] = {"all-reduce": Blocks.name, "server": Mercury.name}


def default(backend: BackendName = "all-reduce") -> str:
    """The policy for a command or a session that needs one and was given none."""
    return _DEFAULTS[backend]


def names(backend: BackendName | None = None, external: bool = False, with_bus: bool = False) -> tuple[str, ...]:
    """Names of policies, in the order of `gradlane policies`.

    Args:
        backend: only policies that this backend carries; None: all.
        external: whether the backend's servers run in processes of their own.
        with_bus: whether sums are made within hosts of several devices first.
    """
    cannot = frozenset[str]() if backend is None else _CANNOT[backend]
    cannot |= (_CANNOT_EXTERNAL if external else frozenset()) | (_CANNOT_WITH_BUS if with_bus else frozenset())
    return tuple(name for name in _BY_NAME if name not in cannot)


def get(name: str, **knobs: Any) -> Policy:
    """The policy of a name, with some of its knobs set.

    Raises:
        InputError: there is no such policy (the message lists those that exist) or knob.
    """
    if name not in _BY_NAME:
        raise InputError(f"policy: got {name!r}{did_you_mean(name, _BY_NAME)}, expected one of {', '.join(_BY_NAME)}")
    kind = _BY_NAME[name]
    unknown = sorted(set(knobs) - set(kind.__struct_fields__))
    if unknown:
        known = kind.__struct_fields__
        meant = did_you_mean(unknown[0], known)
        raise InputError(f"policy {name}: got knob {unknown[0]!r}{meant}, expected {', '.join(known) or 'none'}")
    return kind(**knobs)


__all__ = ["Policy", "default", "get", "names"]
