"""DdpRun: what was measured of a training script under torch's DistributedDataParallel."""

from __future__ import annotations

import msgspec

from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.timeline import Timeline


class DdpRun(msgspec.Struct, frozen=True):
    """Some steps of a script, by one clock a rank; times in ns.

    Attributes:
        model, device: names, for people.
        workers: ranks.
        step_ns: each measured step under DDP, of the slowest rank.
        alone_ns: each step in which no gradient was summed, of the slowest rank.
        waits_ns: by rank, for how long of a step (the median) the backward pass was over and sums were not. Empty on a device,
            where the host does not see it.
        profile: of rank 0, measured in the steps without sums; float32 travels as it is.
        network: of all-reduce in the model's own process group.
        plan, timeline: rank 0's buckets and what happened in some further steps; None where the
            script has a communication hook of its own, and on a device.
        hook: the name of that hook; "" for none.
        clips: gradients are clipped before the optimizer's step, which needs all sums.
        scales: a GradScaler asks before the optimizer's step whether gradients are finite.
        reads_norms_alone: if gradients are clipped, always by their norm of order 2, which owners tell sooner.
        reads_parameters: the script reads its parameters after each step, as an average of weights does.
        others: how many further models the script trained under DDP.
    """

    model: str
    device: str
    workers: int
    step_ns: tuple[int, ...]
    alone_ns: tuple[int, ...]
    waits_ns: tuple[int, ...]
    profile: Profile
    network: Network
    plan: Plan | None = None
    timeline: Timeline | None = None
    hook: str = ""
    clips: bool = False
    scales: bool = False
    reads_norms_alone: bool = False
    reads_parameters: bool = False
    others: int = 0

    @property
    def reads(self) -> bool:
        """Whether the script was seen to read gradients before the optimizer's step, so that it waits for all sums."""
        return self.clips or self.scales

    @property
    def norm(self) -> float | None:
        """The order of the norms that are all that the script was seen to need early; None if there is more, or nothing."""
        return 2.0 if self.reads and self.reads_norms_alone and not self.reads_parameters else None

    def to_json(self) -> bytes:
        """For `from_json`."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(text: bytes) -> DdpRun:
        """What `to_json` gave."""
        return msgspec.json.decode(text, type=DdpRun)
