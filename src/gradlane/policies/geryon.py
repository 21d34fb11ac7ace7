"""Geryon: two flows, told apart by the switches; urgent parameters go in the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec

from gradlane.core.checking import MAX_BYTES, need, need_int
from gradlane.core.network import Network
from gradlane.core.plan import Lane, Message, Plan
from gradlane.core.policy import SIZES, KnobRange, cut
from gradlane.core.profile import Profile

THRESHOLDS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)


class Geryon(msgspec.Struct, frozen=True):
    """Slices in two lanes: of high network priority where urgency 1 - l/L is above `threshold` (§III-B, C).

    Layers count from 1 to L in the order of the forward pass, so that a threshold of 0 puts all but the last
    layer in the urgent lane and one of 1 puts nothing there. Within a lane slices go first in, first out.

    Differs from the paper: the threshold is given or found by `search`, which takes the best of those tried,
    where the paper fits a curve through them.
    """

    name: ClassVar[str] = "geryon"
    paper: ClassVar[str] = "Geryon (INFOCOM '20) §III"
    differs: ClassVar[str] = "the threshold is given, or the best of those tried, not fitted"

    tunable: ClassVar[dict[str, KnobRange]] = {"slice_bytes": SIZES}

    threshold: float = 0.5
    slice_bytes: int = 2**20

    def __post_init__(self) -> None:
        need(isinstance(self.threshold, float) and 0 <= self.threshold <= 1, "threshold", self.threshold, "a part from 0 to 1")
        need_int("slice_bytes", self.slice_bytes, 8, MAX_BYTES)

    def plan(self, profile: Profile, network: Network) -> Plan:
        layers = len(profile.layers)
        messages = tuple(
            Message((piece,), lane=0 if 1 - (seen.layer + 1) / layers > self.threshold else 1)
            for tensor, seen in enumerate(profile.tensors)
            for piece in cut(profile, tensor, self.slice_bytes)
        )
        lanes = (Lane(network_priority=0), Lane(network_priority=1))
        return Plan(self.name, profile.model, profile.specs, messages, lanes, crosses_barrier=True)


def search(
    profile: Profile,
    network: Network,
    iteration_ns: Callable[[Plan], int],
    thresholds: Sequence[float] = THRESHOLDS,
    slice_bytes: int = Geryon().slice_bytes,
) -> Geryon:
    """The policy with the best of `thresholds`, one iteration each (§III-C); ties go to the earlier.

    iteration_ns: what an iteration under a plan takes, simulated or measured.
    """
    tried = [Geryon(threshold, slice_bytes) for threshold in thresholds]
    return min(tried, key=lambda policy: iteration_ns(policy.plan(profile, network)))
