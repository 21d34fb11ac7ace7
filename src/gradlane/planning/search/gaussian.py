"""GaussianProcess: Bayesian optimisation over what has been measured."""

from __future__ import annotations

import math
import random
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from gradlane.errors import UnsupportedError
from gradlane.planning.search.prior import Prior
from gradlane.planning.search.space import Point

Floats = npt.NDArray[np.float64]

XI = 0.1
"""How much better a point must be to count as an improvement, in standard deviations of the
measured values.

ByteScheduler §4.3 has 0.1 without a unit.
"""
WORTH_TRYING = math.log(2.0)  # points that the prior expects to take twice as long as its best are never tried
ALL_ALIKE = math.log(4.0)  # values are capped at four times the best: beyond, they tell nothing about other points
APART = 0.04  # points nearer than this to a measured one have nearly its sizes, and trying them tells little
_SIDE, _ALONG, _MOST = 33, 129, 2048  # candidates: lattice points a side in two dimensions, in one, and random points in more


class GaussianProcess:
    """Models the logarithm of the value over the unit cube and asks for the greatest expected
    improvement.

    The kernel is a Matern kernel (nu = 5/2, one length scale for each dimension) plus noise, fitted
    by maximum likelihood within bounds, so that repeated measurements may differ. The best point is
    the one with the lowest fitted mean, not with the lowest (perhaps lucky) measurement.

    With a prior, which becomes the mean of the process, the first point is the prior's best, and
    the process models the prior's error. A prior that is wrong by a constant factor does no harm, as the process has
    a level of its own. A prior of wrong shape is scaled down as far as measurements disagree. Points that the prior
    expects to be twice as slow as its best are never tried. Without a prior, the first dimensions + 1 points are
    random.

    Args:
        dimensions: number of knobs.
        seed: the same seed gives the same proposals.
        prior: predictions, or None.
        xi: see `XI`.

    Raises:
        UnsupportedError: scikit-learn is not installed.
    """

    def __init__(self, dimensions: int, seed: int, prior: Prior | None = None, *, xi: float = XI) -> None:
        self._regressor = _regressor(dimensions, seed)
        self._xi = xi
        draw = random.Random(seed)
        self._candidates = _candidates(dimensions, draw)
        self._prior = prior
        self._expected = np.zeros(len(self._candidates)) if prior is None else prior(self._candidates)
        self._worth = self._expected <= self._expected.min() + WORTH_TRYING
        self._first = (
            [] if prior is not None else [tuple(draw.random() for _ in range(dimensions)) for _ in range(dimensions + 1)]
        )
        self._points: list[Point] = []
        self._logs: list[float] = []
        self._next: Point | None = None

    def ask(self) -> Point:
        if self._next is None:
            self._next = self._propose()
        return self._next

    def tell(self, point: Point, value: float) -> None:
        self._points.append(point)
        self._logs.append(math.log(value))
        self._next = None

    def _propose(self) -> Point:
        if len(self._points) < len(self._first):
            return self._first[len(self._points)]
        if not self._points:
            return self._candidate(int(self._expected.argmin()))
        from threadpoolctl import threadpool_limits

        points, logs = np.array(self._points), np.array(self._logs)
        logs = np.minimum(logs, logs.min() + ALL_ALIKE)
        scale = max(float(logs.std()), 0.01)
        expected = np.zeros(len(points)) if self._prior is None else self._prior(points)
        share = _share(expected, logs)
        level = float(np.median(logs - share * expected))
        # the matrices are so small that a second thread only costs time
        with threadpool_limits(1, user_api="blas"), warnings.catch_warnings():  # a length at its bound is as good as any
            warnings.simplefilter("ignore")
            self._regressor.fit(points, logs - share * expected - level)
            best = float((self._regressor.predict(points) + share * expected + level).min())
            means, deviations = self._regressor.predict(self._candidates, return_std=True)
        # the deviation of the mean, without measurement noise
        deviations = np.sqrt(np.maximum(deviations**2 - self._regressor.kernel_.k2.noise_level, 0.0))
        gain = expected_improvement(means + share * self._expected + level, deviations, best - self._xi * scale)
        distances = np.abs(self._candidates[:, None, :] - points[None, :, :]).max(axis=2).min(axis=1)
        gain[distances < APART] = 0.0
        gain[~self._worth] = -1.0  # if every point worth trying is known, repeat one of them
        return self._candidate(int(gain.argmax()))

    def _candidate(self, index: int) -> Point:
        return tuple(float(part) for part in self._candidates[index])


def _share(expected: Floats, logs: Floats) -> float:
    """The fraction of its prior that fits what was measured, 0 to 1, by regularized least squares."""
    x, y = expected - expected.mean(), logs - logs.mean()
    belief = 0.1**2
    return float(np.clip((x @ y + belief) / (x @ x + belief), 0.0, 1.0))


def expected_improvement(means: Floats, deviations: Floats, target: float) -> Floats:
    """Expected amount by which normal variables are below `target` (Brochu et al., Eq. 4)."""
    from scipy.special import ndtr

    below = target - means
    deviations = np.maximum(deviations, 1e-12)
    ratio = below / deviations
    density = np.exp(-0.5 * ratio**2) / math.sqrt(2 * math.pi)
    gain: Floats = below * ndtr(ratio) + deviations * density
    return gain


def _candidates(dimensions: int, draw: random.Random) -> Floats:
    if dimensions > 2:
        return np.array([[draw.random() for _ in range(dimensions)] for _ in range(_MOST)])
    side = np.linspace(0, 1, _ALONG if dimensions == 1 else _SIDE)
    return np.stack(np.meshgrid(*[side] * dimensions, indexing="ij"), axis=-1).reshape(-1, dimensions)


def _regressor(dimensions: int, seed: int) -> Any:
    require_scikit_learn()
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    # logarithms: 0.05 is 5 %. Few points determine little, so the bounds keep to what iteration
    # times do.
    signal = ConstantKernel(0.2**2, (0.1**2, 1.0)) * Matern([0.3] * dimensions, (0.1, 2.0), nu=2.5)
    noise = WhiteKernel(0.02**2, (0.003**2, 0.2**2))
    return GaussianProcessRegressor(signal + noise, random_state=seed)


def require_scikit_learn() -> None:
    """Raise `UnsupportedError`, with what to install, if scikit-learn is not installed."""
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"the search by Gaussian process needs scikit-learn, which cannot be imported ({error}); install it with: "
            "pip install 'gradlane[tune]', or use another search"
        ) from error
