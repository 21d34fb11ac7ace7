"""Overrides: what a launcher's command line says, for every `attach` in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from gradlane.core.backends import BackendName
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.live.session.verification import VerifyOptions
from gradlane.planning.tuning import TuneOptions

SummationOrder = Literal["arrival", "rank"]


class Overrides(msgspec.Struct, frozen=True):
    """What a launcher's command line says; it wins over what the script passes to `attach`.

    servers_store: "host:port" of the store at which servers of their own meet the job, if it is not the job's.

    timeline, profile: folders in which each rank leaves its timeline and rank 0 its profile when a session closes.
    """

    policy: str | Policy | Plan | None = None
    backend: BackendName | None = None
    packet_bytes: int | None = None
    summation_order: SummationOrder | None = None
    servers: int | None = None
    servers_store: str | None = None
    network: Network | None = None
    timeout: float | None = None
    weight: int | None = None
    timeline: Path | None = None
    profile: Path | None = None
    tune: TuneOptions | None = None
    knobs: Path | None = None
    verify: VerifyOptions | None = None


_overrides = Overrides()


def overrides() -> Overrides:
    """What every `attach` in this process obeys."""
    return _overrides


def override(overrides: Overrides) -> None:
    """Every later `attach` in this process obeys `overrides`."""
    global _overrides
    _overrides = overrides
