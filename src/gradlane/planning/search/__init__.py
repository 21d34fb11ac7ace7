"""Searches for the best of a few sizes by trying them, behind one protocol: no clock, no I/O, the seed handed in.

They are what ByteScheduler (SOSP '19) compares in §6.3 and Fig. 14. `gaussian-process` is the one to use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gradlane.errors import InputError
from gradlane.planning.search.gaussian import GaussianProcess
from gradlane.planning.search.grid import Grid
from gradlane.planning.search.momentum import Momentum
from gradlane.planning.search.prior import Prior, predicted
from gradlane.planning.search.space import Point, Space


class Search(Protocol):
    """Proposes a point, is told how long an iteration took there, and so on for as long as one likes."""

    def ask(self) -> Point:
        """The point to try next. Asked again before it is told anything, it says the same."""
        ...

    def tell(self, point: Point, value: float) -> None:
        """An iteration took `value` (in any unit, more than 0) at `point`, which need not be the one proposed."""
        ...


_BY_NAME: dict[str, Callable[[int, int, Prior | None], Search]] = {
    "gaussian-process": lambda dimensions, seed, prior: GaussianProcess(dimensions, seed, prior),
    "random": lambda dimensions, seed, prior: Grid.random(dimensions, seed),
    "grid": lambda dimensions, seed, prior: Grid.regular(dimensions),
    "momentum": lambda dimensions, seed, prior: Momentum(dimensions, seed),
}

NAMES = tuple(_BY_NAME)
DEFAULT = "gaussian-process"


def start(name: str, dimensions: int, seed: int, prior: Prior | None = None) -> Search:
    """The search of that name at its beginning. `prior`: used by `gaussian-process` alone.

    Raises `InputError` for another name, `UnsupportedError` where scikit-learn is needed and absent.
    """
    if name not in _BY_NAME:
        raise InputError(f"search: got {name!r}, expected one of {', '.join(NAMES)}")
    return _BY_NAME[name](dimensions, seed, prior)


__all__ = ["DEFAULT", "NAMES", "GaussianProcess", "Grid", "Momentum", "Point", "Prior", "Search", "Space", "predicted", "start"]
