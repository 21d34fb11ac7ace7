"""Mercury without preemption: packets first in, first out, returned as soon as they are summed."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gradlane.core.network import Network
from gradlane.core.plan import Message, Plan
from gradlane.core.policy import whole
from gradlane.core.profile import Profile


class MercuryNoPreemption(msgspec.Struct, frozen=True):
    """One message for each tensor; push and pull overlap packet by packet (§V-B).

    Packets go first in, first out, so this shows what Mercury gains without preemption.

    Wins where servers carry the messages and tensors are alike in size. What it is behind `mercury`
    is what preemption gains.

    Differs from the paper: nothing known.
    """

    name: ClassVar[str] = "mercury-no-preemption"
    paper: ClassVar[str] = "Mercury (TPDS '23) §V-B, Mercury W/O Preemption"
    differs: ClassVar[str] = "-"

    def plan(self, profile: Profile, network: Network) -> Plan:
        messages = tuple(Message((whole(profile, tensor),)) for tensor in range(len(profile.tensors)))
        return Plan(self.name, profile.model, profile.specs, messages, wire="packet-fifo", crosses_barrier=True)
