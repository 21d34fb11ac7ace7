"""The live driver: a running PyTorch job with its gradients scheduled. The only package that imports torch."""

from gradlane.live.attachment import attach
from gradlane.live.session import Session

__all__ = ["Session", "attach"]
