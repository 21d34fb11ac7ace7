"""Puts the drop-in where scripts and trainers find torch's DistributedDataParallel."""

from __future__ import annotations

import torch

from gradlane.live.ddp.wrapper import DistributedDataParallel


def replace_ddp() -> None:
    """From now on `torch.nn.parallel.DistributedDataParallel` is gradlane's, in this process.

    Call it before the script, or the trainer that it uses, imports torch's by name. Models that are
    wrapped already stay as they are. `gradlane launch --ddp` calls it before the script begins.
    """
    torch.nn.parallel.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]
    torch.nn.parallel.distributed.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]
