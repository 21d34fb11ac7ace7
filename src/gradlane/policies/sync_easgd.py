"""SyncEASGD: one message at the end of the backward pass."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.policy import merge
from gradlane.core.profile import Profile


class SyncEasgd(msgspec.Struct, frozen=True):
    """All gradients as one message, so that the startup is paid once (MG-WFBP §2.4, Eq. 9).

    Wins where startups cost more than overlap saves: a small model on many workers. It hides
    nothing.

    Differs from the paper: one message for each dtype, if a model has several.
    """

    name: ClassVar[str] = "sync-easgd"
    paper: ClassVar[str] = "You et al. (SC '17); MG-WFBP (TPDS '21) §2.4"
    differs: ClassVar[str] = "one message a dtype where a model has several"

    def plan(self, profile: Profile, network: Network) -> Plan:
        messages = merge(profile, range(len(profile.tensors)))
        return Plan(self.name, profile.model, profile.specs, tuple(messages))
