"""The door for other frameworks: a training loop's gradients scheduled under a plan, without torch.

A plugin is two things: a `Summation`, which sums messages over ranks, and a loop that says to the `Core` when gradients are
ready and waits for their sums where it needs them. `NodeSums` is a summation over gradlane's own transport for arrays in CPU
memory; `examples/numpy_training.py` is a loop.
"""

from gradlane.plugin.core import Core, Summation
from gradlane.plugin.sums import NodeSums

__all__ = ["Core", "NodeSums", "Summation"]
