"""Plugins for other frameworks: schedule a training loop's gradients under a plan, without torch.

A plugin is an `Engine`, which moves bytes, and a loop that tells the `Core` when gradients are
ready and waits for their sums. `NodeSums` is an engine over gradlane's transport for arrays in CPU
memory; `examples/numpy_training.py` is a loop.
"""

from gradlane.plugin.core import Core, Engine
from gradlane.plugin.sums import NodeSums

__all__ = ["Core", "Engine", "NodeSums"]
