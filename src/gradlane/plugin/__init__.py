"""The door for other frameworks: a training loop's gradients scheduled under a plan, without torch.

`averaging` is for steps that take all averages at their end; `jax` and `tensorflow` call it from compiled steps. A
loop that waits for each sum by itself uses two parts from here: a `Summation`, which sums messages over ranks, and a
`Core`. The loop reports to the core when gradients are ready, and waits at it for their sums. `NodeSums` is a
summation over gradlane's own transport for arrays in CPU memory; `examples/numpy_training.py` is a loop.
"""

from gradlane.plugin.core import Core, Summation
from gradlane.plugin.sums import NodeSums

__all__ = ["Core", "NodeSums", "Summation"]
