"""WFBP: wait-free back-propagation, what frameworks do without a scheduler."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gradlane.core.network import Network
from gradlane.core.plan import Message, Plan
from gradlane.core.policy import whole
from gradlane.core.profile import Profile


class Wfbp(msgspec.Struct, frozen=True):
    """One message for each tensor, first in, first out (MG-WFBP §2.3, Eq. 7, 8).

    Wins where starting a message costs next to nothing, as over servers on a fast fabric. Elsewhere
    it is what the others are measured by.

    Differs from the paper: no.
    """

    name: ClassVar[str] = "wfbp"
    paper: ClassVar[str] = "Poseidon (ATC '17); MG-WFBP (TPDS '21) §2.3"
    differs: ClassVar[str] = "no"

    def plan(self, profile: Profile, network: Network) -> Plan:
        messages = tuple(Message((whole(profile, tensor),)) for tensor in range(len(profile.tensors)))
        return Plan(self.name, profile.model, profile.specs, messages)
