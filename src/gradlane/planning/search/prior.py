"""Prior: what the simulator predicts for every point, as a search's starting knowledge."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradlane.core.policy import Policy
from gradlane.planning.search.space import Space

STEPS = 7


@dataclass(frozen=True)
class Prior:
    """Predicted values on a regular lattice over the unit cube, interpolated linearly.

    Attributes:
        logs: natural logarithms, one axis for each dimension, one entry for each lattice step.
    """

    logs: npt.NDArray[np.float64]

    def __call__(self, points: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The predicted logarithms at `points`, of shape (count, dimensions)."""
        last = np.array(self.logs.shape) - 1
        places = points * last
        below = np.minimum(places.astype(np.intp), np.maximum(last - 1, 0))
        parts = places - below
        found = np.zeros(len(points))
        for corner in itertools.product((0, 1), repeat=self.logs.ndim):
            weights = np.prod(np.where(corner, parts, 1 - parts), axis=1)
            found += weights * self.logs[tuple(np.minimum(below + corner, last).T)]
        return found


def predicted(space: Space, judge: Callable[[Policy], int], steps: int = STEPS) -> Prior:
    """The predictions of `judge` for `steps` values of each knob.

    Args:
        space: the knobs.
        judge: from a policy to its simulated iteration time in ns.
        steps: lattice points for each knob.
    """
    side = [step / (steps - 1) for step in range(steps)]
    logs = [math.log(max(1, judge(space.at(point)))) for point in itertools.product(side, repeat=space.dimensions)]
    return Prior(np.array(logs).reshape((steps,) * space.dimensions))
