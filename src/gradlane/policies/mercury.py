"""Mercury: whole tensors; the transport sends the most urgent packet next."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gradlane.core.network import Network
from gradlane.core.plan import Message, Plan
from gradlane.core.policy import whole
from gradlane.core.profile import Profile


class Mercury(msgspec.Struct, frozen=True):
    """One message for each tensor; its packets go by priority (§IV, Algorithm 1).

    The transport cuts messages into packets, always sends the most urgent one next, and servers
    return each packet as soon as it is summed. So push and pull overlap and an urgent tensor
    preempts others.

    Wins where servers carry the messages: packets make both waiting for large tensors and merging
    small ones needless.

    Differs from the paper: urgency is the recorded first use of a parameter, not its place in the
    model. Servers return sums by priority too, where the text suggests the order of arrival.
    """

    name: ClassVar[str] = "mercury"
    paper: ClassVar[str] = "Mercury (TPDS '23) Algorithm 1"
    differs: ClassVar[str] = "order of recorded first use; sums return by priority"

    def plan(self, profile: Profile, network: Network) -> Plan:
        urgency = profile.urgency()
        messages = tuple(Message((whole(profile, tensor),), urgency[tensor]) for tensor in range(len(profile.tensors)))
        return Plan(self.name, profile.model, profile.specs, messages, wire="packet-priority", crosses_barrier=True)
