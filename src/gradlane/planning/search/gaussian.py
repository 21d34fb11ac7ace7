"""GaussianProcess: regression on what has been measured, and the point that promises most (Bayesian optimisation)."""

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
"""By how much a point is to be better to count as an improvement, in standard deviations of what was measured.
ByteScheduler §4.3 has 0.1 and no unit."""
WORTH_TRYING = math.log(2.0)  # what the prior expects to take twice as long as the best of its points is never tried
ALL_ALIKE = math.log(4.0)  # beyond four times the best, how bad a point is says nothing about the others
APART = 0.04  # nearer to a point measured, sizes are much the same, and trying them tells little
_SIDE, _ALONG, _MOST = 33, 129, 2048  # candidates: a lattice of two dimensions, of one, and points drawn of more


class GaussianProcess:
    """Models the logarithm of the value over the unit cube and asks for the greatest expected improvement.

    The kernel is a Matern (nu = 5/2, a length a dimension) with a term for noise, both fitted by maximum likelihood
    within bounds, so that a point measured twice may differ, and what is noise is not chased. The best so far is the
    lowest of the fitted means at the points measured, not the lowest measurement (a lucky one).

    With a prior, which is the mean of the process, the first point is the best that it expects, and what is fitted
    is by how much it errs. As a mean it is still there after the first trials, where starting points would be
    forgotten. A level that is wrong everywhere does no harm, since the process has one of its own, and a shape that
    is wrong not for long: the prior counts for as much of itself, from all to nothing, as fits what was measured.
    Points that it expects to be twice as slow as its best are not tried at all. Without a prior the first points
    are random, one more than there are dimensions.

    Raises `UnsupportedError` without scikit-learn.
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
        # so little is done at once that more threads than one make it slower, most where they must share cores
        with threadpool_limits(1, user_api="blas"), warnings.catch_warnings():  # a length at its bound is as good as any
            warnings.simplefilter("ignore")
            self._regressor.fit(points, logs - share * expected - level)
            best = float((self._regressor.predict(points) + share * expected + level).min())
            means, deviations = self._regressor.predict(self._candidates, return_std=True)
        # of what the time is, without the noise of measuring it
        deviations = np.sqrt(np.maximum(deviations**2 - self._regressor.kernel_.k2.noise_level, 0.0))
        gain = expected_improvement(means + share * self._expected + level, deviations, best - self._xi * scale)
        distances = np.abs(self._candidates[:, None, :] - points[None, :, :]).max(axis=2).min(axis=1)
        gain[distances < APART] = 0.0
        gain[~self._worth] = -1.0  # where all that is worth trying is known: again, not beyond
        return self._candidate(int(gain.argmax()))

    def _candidate(self, index: int) -> Point:
        return tuple(float(part) for part in self._candidates[index])


def _share(expected: Floats, logs: Floats) -> float:
    """How much of its prior fits what was measured, 0 to 1: least squares, with a few per cent of belief in all of it."""
    x, y = expected - expected.mean(), logs - logs.mean()
    belief = 0.1**2
    return float(np.clip((x @ y + belief) / (x @ x + belief), 0.0, 1.0))


def expected_improvement(means: Floats, deviations: Floats, target: float) -> Floats:
    """By how much normal variables are expected to be below `target`, those above it counted as 0 (Brochu et al., Eq. 4)."""
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

    # logarithms: 0.05 is five per cent. Few points decide little, so the bounds keep to what iteration times do
    signal = ConstantKernel(0.2**2, (0.1**2, 1.0)) * Matern([0.3] * dimensions, (0.1, 2.0), nu=2.5)
    noise = WhiteKernel(0.02**2, (0.003**2, 0.2**2))
    return GaussianProcessRegressor(signal + noise, random_state=seed)


def require_scikit_learn() -> None:
    """Raise `UnsupportedError` with what to install where scikit-learn is absent."""
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"the search by Gaussian process needs scikit-learn, which cannot be imported ({error}); install it with: "
            "pip install 'gradlane[tune]', or use another search"
        ) from error
