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
    """Proposes a point, is told how long an iteration took there, and so on.

    A point has one number from 0 to 1 for each knob, from the smallest value of its range to the
    largest; `Space` turns it into values. A search draws whatever it draws from a seed that it was
    given, so that one that is told the same proposes the same. It never ends: its owner stops asking.
    `gradlane.testing.searches.check_search` checks all that is promised here.
    """

    def ask(self) -> Point:
        """The point to try next.

        Returns:
            A tuple of as many numbers as the space has dimensions, each from 0 to 1. Asked again
            before it is told anything, the search returns the same point.
        """
        ...

    def tell(self, point: Point, value: float) -> None:
        """How long an iteration took at a point.

        Args:
            point: as `ask` returns them; it need not be the one proposed, and may be told twice,
                with another value.
            value: the time, more than 0, in any unit that stays the same; less is better. It has
                the noise of measuring.
        """
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
