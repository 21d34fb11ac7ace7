"""The live driver: a running PyTorch job with its gradients scheduled. The only package that imports torch."""

from gradlane.live.ddp import DistributedDataParallel, replace_ddp
from gradlane.live.remote_update import ServedSession, attach_to_servers
from gradlane.live.session.idle import IdleSession
from gradlane.live.session.session import Session
from gradlane.live.session.verification import VerifyOptions
from gradlane.live.startup.attach import attach

__all__ = [
    "DistributedDataParallel", "IdleSession", "ServedSession", "Session", "VerifyOptions", "attach", "attach_to_servers",
    "replace_ddp",
]  # fmt: skip
