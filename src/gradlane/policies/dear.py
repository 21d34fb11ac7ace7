"""DeAR: reduce-scatter overlaps with the backward pass, all-gather with the forward pass."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gradlane.core.fields import MAX_BYTES, need_int
from gradlane.core.network import Network
from gradlane.core.plan import Message, Plan
from gradlane.core.policy import whole
from gradlane.core.profile import Profile


class Dear(msgspec.Struct, frozen=True):
    """Neighbours are fused; reduce-scatter in backward, all-gather in forward order.

    Each all-reduce travels as two operations, and each of them overlaps with one pass.

    Wins where all-reduce takes longer than the backward pass: the second half of each message
    passes behind the forward pass, and large fusions keep startups few.

    Differs from the paper: the fusion size is given, not tuned. All-gathers go by recorded first
    use and start when the last reduce-scatter has ended; in the paper, at the end of the backward
    pass. Over servers the two operations are push and pull.

    Attributes:
        fusion_bytes: the most bytes of a fusion of several tensors.
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
