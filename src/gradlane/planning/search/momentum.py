"""Momentum: gradient descent with momentum on finite differences, with restarts."""

from __future__ import annotations

import math
import random
from collections.abc import Generator

from gradlane.planning.search.space import Point


class Momentum:
    """Gradient descent with momentum on the value's logarithm (ByteScheduler §6.3).

    v <- momentum v - rate slope, x <- x + v. The slope takes one more trial for each dimension, at
    distance `reach`. After `patience` points in a row that are not better than the best of this
    descent by 1 %, it restarts at a random point.
    """

    def __init__(
        self, dimensions: int, seed: int, *, rate: float = 0.1, momentum: float = 0.5, reach: float = 0.1, patience: int = 3
    ) -> None:
        self._dimensions = dimensions
        self._draw = random.Random(seed)
        self._rate, self._momentum, self._reach, self._patience = rate, momentum, reach, patience
        self._walk = self._descents()
        self._next = next(self._walk)

    def ask(self) -> Point:
        return self._next

    def tell(self, point: Point, value: float) -> None:
        if point == self._next:
            self._next = self._walk.send(math.log(value))

    def _descents(self) -> Generator[Point, float, None]:
        while True:
            here = tuple(self._draw.random() for _ in range(self._dimensions))
            speed = [0.0] * self._dimensions
            best, worse = math.inf, 0
            while worse < self._patience:
                value = yield here
                if value < best - 0.01:
                    best, worse = value, 0
                else:
                    worse += 1
                slopes = []
                for dimension in range(self._dimensions):
                    # inwards at the edge
                    reach = self._reach if here[dimension] + self._reach <= 1 else -self._reach
                    there = tuple(part + reach * (index == dimension) for index, part in enumerate(here))
                    slopes.append(((yield there) - value) / reach)
                speed = [self._momentum * v - self._rate * slope for v, slope in zip(speed, slopes, strict=True)]
                here = tuple(min(1.0, max(0.0, part + v)) for part, v in zip(here, speed, strict=True))
