"""Grid and random search: points in an order that no measurement changes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from gradlane.planning.search.space import Point


class Grid:
    """Proposes given points one by one."""

    def __init__(self, points: Iterator[Point]) -> None:
        self._points = points
        self._next = next(points)

    @classmethod
    def regular(cls, dimensions: int, steps: int = 8) -> Grid:
        """`steps` points a side from the smallest up, the first dimension slowest, again and again."""
        side = [step / (steps - 1) for step in range(steps)]
        return cls(itertools.cycle(itertools.product(side, repeat=dimensions)))

    @classmethod
    def random(cls, dimensions: int, seed: int) -> Grid:
        """Points drawn uniformly from the unit cube."""
        draw = random.Random(seed)
        return cls(tuple(draw.random() for _ in range(dimensions)) for _ in itertools.count())

    def ask(self) -> Point:
        return self._next

    def tell(self, point: Point, value: float) -> None:
        if point == self._next:
            self._next = next(self._points)
