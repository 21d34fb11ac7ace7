"""DDP: the buckets of torch's DistributedDataParallel."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gradlane.core.fields import MAX_BYTES, need_int
from gradlane.core.network import Network
from gradlane.core.plan import Message, Plan
from gradlane.core.policy import SIZES, KnobRange, merge
from gradlane.core.profile import Profile


class Ddp(msgspec.Struct, frozen=True):
    """Buckets in readiness order: a bucket closes when its size reaches the cap (§3.2.3).

    The first bucket has a smaller cap, so that communication starts early.

    Wins where the backward pass hides the network anyway: no schedule gains anything then. It falls
    behind where one bucket holds much of the model, since that bucket leaves last.

    Differs from the paper: torch keeps one bucket open for each dtype and device; here a bucket
    ends where the dtype changes.

    Attributes:
        bucket_bytes: the cap of all buckets but the first, of gradients as they are made: in float32 where they travel in
            halves.
        first_bucket_bytes: the cap of the first.
    """

    name: ClassVar[str] = "ddp"
    paper: ClassVar[str] = "PyTorch Distributed (VLDB '20) §3.2.3"
    differs: ClassVar[str] = "a bucket ends where the dtype changes, torch keeps one open per dtype"

    tunable: ClassVar[dict[str, KnobRange]] = {"bucket_bytes": SIZES}

    bucket_bytes: int = 25 * 2**20
    first_bucket_bytes: int = 2**20

    def __post_init__(self) -> None:
        need_int("bucket_bytes", self.bucket_bytes, 1, MAX_BYTES)
        need_int("first_bucket_bytes", self.first_bucket_bytes, 1, MAX_BYTES)

    def plan(self, profile: Profile, network: Network) -> Plan:
        messages: list[Message] = []
        bucket: list[int] = []
        size_bytes = 0
        for tensor, seen in enumerate(profile.tensors):
            if bucket and profile.tensors[bucket[-1]].spec.dtype != seen.spec.dtype:
                messages += merge(profile, bucket)
                bucket, size_bytes = [], 0
            bucket.append(tensor)
            size_bytes += profile.gradient_bytes(tensor)  # torch's hooks that compress get whole buckets
            if size_bytes >= (self.bucket_bytes if messages else self.first_bucket_bytes):
                messages += merge(profile, bucket)
                bucket, size_bytes = [], 0
        messages += merge(profile, bucket)  # none if the last bucket is closed
        return Plan(self.name, profile.model, profile.specs, tuple(messages))
