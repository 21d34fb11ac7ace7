"""TicTac: whole tensors, in the order in which the forward pass needs them."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gradlane.core.network import Network
from gradlane.core.plan import Lane, Message, Plan
from gradlane.core.policy import whole
from gradlane.core.profile import Profile


class TicTac(msgspec.Struct, frozen=True):
    """One message for each tensor, the most urgent ready one first, one at a time, never cut.

    Wins where a model has few, large tensors, so that startups matter little and the order much
    (VGG-16).

    Differs from the paper: the order is that of recorded first uses (its TIC, on a chain of
    layers), not of a graph's critical paths (TAC), and applies to all-reduce.
    """

    name: ClassVar[str] = "tictac"
    paper: ClassVar[str] = "TicTac (MLSys '19)"
    differs: ClassVar[str] = "order of recorded first use (TIC on a chain), no critical paths (TAC)"

    def plan(self, profile: Profile, network: Network) -> Plan:
        urgency = profile.urgency()
        messages = tuple(Message((whole(profile, tensor),), priority=urgency[tensor]) for tensor in range(len(profile.tensors)))
        # a window of one byte allows one message at a time, since a lone larger one may always go
        lanes = (Lane(window_bytes=1),)
        return Plan(self.name, profile.model, profile.specs, messages, lanes, crosses_barrier=True)
