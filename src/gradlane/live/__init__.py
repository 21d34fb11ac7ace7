"""The live driver: a running PyTorch job with its gradients scheduled. The only package that imports torch."""

from gradlane.live.attachment import attach
from gradlane.live.served import ServedSession, attach_to_servers
from gradlane.live.session import Session
from gradlane.live.verification import VerifyOptions

__all__ = ["ServedSession", "Session", "VerifyOptions", "attach", "attach_to_servers"]
