"""First come, first served, in partitions: what ByteScheduler Fig. 4 varies before there is any priority."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gradlane.core.fields import MAX_BYTES, need_int
from gradlane.core.network import Network
from gradlane.core.plan import Lane, Message, Plan
from gradlane.core.policy import cut
from gradlane.core.profile import Profile


class FirstCome(msgspec.Struct, frozen=True):
    """Tensors cut to `partition_bytes`, in the order in which they become ready, `credit_bytes` unfinished."""

    name: ClassVar[str] = "first-come"
    paper: ClassVar[str] = "ByteScheduler (SOSP '19) §2.3, what Fig. 4 varies"
    differs: ClassVar[str] = "no"

    partition_bytes: int
    credit_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        need_int("partition_bytes", self.partition_bytes, 8, MAX_BYTES)
        need_int("credit_bytes", self.credit_bytes, 1, MAX_BYTES)

    def plan(self, profile: Profile, network: Network) -> Plan:
        pieces = [piece for tensor in range(len(profile.tensors)) for piece in cut(profile, tensor, self.partition_bytes)]
        messages = tuple(Message((piece,)) for piece in pieces)
        lanes = (Lane(window_bytes=self.credit_bytes),)
        return Plan(self.name, profile.model, profile.specs, messages, lanes, crosses_barrier=True)
