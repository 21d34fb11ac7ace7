"""A policy of your own: `gradlane simulate vgg16 --policy examples/own_policy.py:EqualParts`.

The model is cut into parts of equal bytes, in the order in which the forward pass uses them, and
the part that is used first goes first. Wherever a command takes a policy's name it takes the place
of such a class too. `test_own_policy.py` checks it; docs/policies.md has every step.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gradlane.core.fields import need_int
from gradlane.core.network import Network
from gradlane.core.plan import Lane, Message, Plan, Slice
from gradlane.core.policy import KnobRange, cut
from gradlane.core.profile import Profile


class EqualParts(msgspec.Struct, frozen=True):
    """About `parts` messages of as many bytes each, the most urgent first, two at a time."""

    name: ClassVar[str] = "equal-parts"
    paper: ClassVar[str] = "none: an example"
    differs: ClassVar[str] = "no"
    tunable: ClassVar[dict[str, KnobRange]] = {"parts": KnobRange(2, 64, step=1)}

    parts: int = 16

    def __post_init__(self) -> None:
        need_int("parts", self.parts, 1, 100_000)

    def plan(self, profile: Profile, network: Network) -> Plan:
        part_bytes = max(8, profile.size_bytes // self.parts)
        urgency = profile.urgency()  # of each tensor: 0 for what the forward pass uses first
        messages: list[Message] = []
        part: list[Slice] = []
        for tensor in sorted(range(len(urgency)), key=urgency.__getitem__):
            for piece in cut(profile, tensor, part_bytes):
                if part and not self._fits(profile, part, piece, part_bytes):
                    messages.append(Message(tuple(part), priority=len(messages)))
                    part = []
                part.append(piece)
        messages.append(Message(tuple(part), priority=len(messages)))
        lane = Lane(window_bytes=2 * part_bytes)
        return Plan(self.name, profile.model, profile.specs, tuple(messages), (lane,), crosses_barrier=True)

    @staticmethod
    def _fits(profile: Profile, part: list[Slice], piece: Slice, part_bytes: int) -> bool:
        specs = profile.specs
        is_homogeneous = specs[part[0].tensor].dtype == specs[piece.tensor].dtype  # a sum has one dtype
        return is_homogeneous and sum(each.size_bytes for each in part) + piece.size_bytes <= part_bytes
