"""Searches for the best of a few sizes by trying them, behind one protocol.

They are those that ByteScheduler (SOSP '19) compares in §6.3 and Fig. 14, without clock or I/O,
seeded. Use `gaussian-process`.
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
    """Proposes a point, is told how long an iteration took there, and proposes the next."""

    def ask(self) -> Point:
        """The point to try next; the same until `tell` is called."""
        ...

    def tell(self, point: Point, value: float) -> None:
        """An iteration took `value` (any unit, above 0) at `point`, proposed or not."""
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
    """Start a search.

    Args:
        name: one of `NAMES`.
        dimensions: number of knobs.
        seed: the same seed gives the same search.
        prior: predictions, used by `gaussian-process` alone.

    Raises:
        InputError: another name.
        UnsupportedError: the search needs scikit-learn, which is not installed.
    """
    if name not in _BY_NAME:
        raise InputError(f"search: got {name!r}, expected one of {', '.join(NAMES)}")
    return _BY_NAME[name](dimensions, seed, prior)


__all__ = ["DEFAULT", "NAMES", "GaussianProcess", "Grid", "Momentum", "Point", "Prior", "Search", "Space", "predicted", "start"]
