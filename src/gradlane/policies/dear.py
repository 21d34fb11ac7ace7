"""DeAR: all-reduce in two halves, one behind the backward pass, one behind the forward pass."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gradlane.core.fields import MAX_BYTES, need_int
from gradlane.core.network import Network
from gradlane.core.plan import Message, Plan
from gradlane.core.policy import whole
from gradlane.core.profile import Profile


class Dear(msgspec.Struct, frozen=True):
    """Neighbours fused up to `fusion_bytes`, reduce-scattered in backward, gathered in the order of the forward pass.

    Differs from the paper: the size of a fusion is given, not tuned; gathers are ordered by the recorded first use
    and begin when the last reduce-scatter has ended, which there is the end of the backward pass. Over servers the
    halves are push and pull.
    """

    name: ClassVar[str] = "dear"
    paper: ClassVar[str] = "DeAR (ICDCS '23)"
    differs: ClassVar[str] = "fusion_bytes is given, not tuned; gathers in order of recorded first use"

    fusion_bytes: int = 25 * 2**20

    def __post_init__(self) -> None:
        need_int("fusion_bytes", self.fusion_bytes, 1, MAX_BYTES)

    def plan(self, profile: Profile, network: Network) -> Plan:
        urgency = profile.urgency()
        groups: list[list[int]] = []
        size_bytes = 0
        for tensor, seen in enumerate(profile.tensors):
            size_bytes += seen.spec.size_bytes
            if not groups or size_bytes > self.fusion_bytes or profile.tensors[groups[-1][-1]].spec.dtype != seen.spec.dtype:
                groups.append([])
                size_bytes = seen.spec.size_bytes
            groups[-1].append(tensor)
        messages = tuple(
            Message(tuple(whole(profile, t) for t in group), priority=min(urgency[t] for t in group), two_phase=True)
            for group in groups
        )
        return Plan(self.name, profile.model, profile.specs, messages, crosses_barrier=True)
