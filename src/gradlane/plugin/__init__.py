"""The door for other frameworks: a training loop's gradients scheduled under a plan, without torch.

A plugin is two things: an `Engine`, which moves bytes, and a loop that says to the `Core` when gradients are ready and
waits for their sums where it needs them. `NodeSums` is an engine over gradlane's own transport for arrays in CPU memory;
`examples/numpy_training.py` is a loop.
"""

from gradlane.plugin.core import Core, Engine
from gradlane.plugin.sums import NodeSums

__all__ = ["Core", "Engine", "NodeSums"]
