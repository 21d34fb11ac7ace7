"""Mercury: whole tensors, the wire sends the most urgent packet next."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gradlane.core.network import Network
from gradlane.core.plan import Message, Plan
from gradlane.core.policy import whole
from gradlane.core.profile import Profile


class Mercury(msgspec.Struct, frozen=True):
    """A message a tensor, handed over when ready; packets by priority, each returned once summed (§IV, Algorithm 1).

    Differs from the paper: a tensor is as urgent as the recorded first use of its parameter says, not as its
    place in the model does.
    """

    name: ClassVar[str] = "mercury"
    paper: ClassVar[str] = "Mercury (TPDS '23) Algorithm 1"
    differs: ClassVar[str] = "order of recorded first use"

    def plan(self, profile: Profile, network: Network) -> Plan:
        urgency = profile.urgency()
        messages = tuple(Message((whole(profile, tensor),), urgency[tensor]) for tensor in range(len(profile.tensors)))
        return Plan(self.name, profile.model, profile.specs, messages, wire="packet-priority", crosses_barrier=True)
