"""ByteScheduler: slices by priority under a credit window."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gradlane.core.fields import MAX_BYTES, need_int
from gradlane.core.network import Network
from gradlane.core.plan import Lane, Plan
from gradlane.core.policy import SIZES, KnobRange, sliced_by_urgency
from gradlane.core.profile import Profile


class ByteScheduler(msgspec.Struct, frozen=True):
    """Tensors cut to `partition_bytes`, the most urgent first, `credit_bytes` unfinished (§4.2, Algorithm 1).

    Differs from the paper: a slice starts when the credit equals its size too (line 16 asks for more, which
    makes a window of one slice never open); a lone slice larger than the credit may go. A plan has the knobs that
    it is given; `tune` finds better ones while a job trains (§4.3).
    """

    name: ClassVar[str] = "bytescheduler"
    paper: ClassVar[str] = "ByteScheduler (SOSP '19) Algorithm 1"
    differs: ClassVar[str] = "credit equal to the slice suffices"

    tunable: ClassVar[dict[str, KnobRange]] = {"partition_bytes": SIZES, "credit_bytes": SIZES}

    partition_bytes: int = 2**20
    credit_bytes: int = 4 * 2**20

    def __post_init__(self) -> None:
        need_int("partition_bytes", self.partition_bytes, 8, MAX_BYTES)
        need_int("credit_bytes", self.credit_bytes, 1, MAX_BYTES)

    def plan(self, profile: Profile, network: Network) -> Plan:
        messages = sliced_by_urgency(profile, self.partition_bytes)
        lanes = (Lane(window_bytes=self.credit_bytes),)
        return Plan(self.name, profile.model, profile.specs, messages, lanes, crosses_barrier=True)
