"""DistributedDataParallel with its gradients scheduled: a drop-in, and torch's own put out of its place."""

from gradlane.live.ddp.replace import replace_ddp, replaced_ddp
from gradlane.live.ddp.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel", "replace_ddp", "replaced_ddp"]
