"""A rank of `python -m bench.auto --varying`: train under one arm while links vary, and count the iterations of a while.

argv: the profile's file, the arm as JSON, or "torch-ddp", from when to when to count, in seconds from the start, and where
rank 0 leaves a `Counted`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from gradlane.compare.arms import BASELINE, ArmSpec
from gradlane.compare.worker import Arm, EmulatedWorkload
from gradlane.core import files
from gradlane.core.profile import Profile

_TOGETHER = 5  # iterations between two times at which ranks agree whether it is over


class Counted(msgspec.Struct, frozen=True):
    """Iterations a second, what was in force at the end, and the looks of auto, in all."""

    per_second: float
    policy: str
    looks: int


def main(profile: str, arm: str, begin_s: str, end_s: str, out: str) -> None:
    started = time.monotonic()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    spec = None if arm == BASELINE else msgspec.json.decode(arm, type=ArmSpec)
    trained = Arm(spec.name if spec is not None else BASELINE, spec, EmulatedWorkload(files.read(profile, Profile)), 60.0)
    ends: list[float] = []
    over = torch.zeros(1)
    while not over:
        trained.step()
        ends.append(time.monotonic() - started)
        if len(ends) % _TOGETHER == 0:
            over.fill_(ends[-1] > float(end_s))
            dist.broadcast(over, 0)
    policy, looks = BASELINE, 0
    if trained.session is not None:
        policy = trained.session.plan.policy
        looks = len(trained.session.auto.looks) if trained.session.auto is not None else 0
        trained.session.close()
    if dist.get_rank() == 0:
        inside = [end for end in ends if float(begin_s) <= end <= float(end_s)]
        # whole iterations only, as a few long ones may be all that there are
        counted = Counted((len(inside) - 1) / (inside[-1] - inside[0]), policy, looks)
        Path(out).write_bytes(msgspec.json.encode(counted))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
