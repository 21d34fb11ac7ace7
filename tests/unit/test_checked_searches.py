"""`check_search` finds each broken promise and says which it is."""

from __future__ import annotations

import random

import pytest

from gradlane.planning.search import Grid
from gradlane.testing.searches import check_search


class Sound:
    """Random points; each class below breaks one promise of it."""

    def __init__(self, dimensions, seed):
        self.dimensions, self.draw = dimensions, random.Random(seed)
        self.point = self.drawn()

    def drawn(self):
        return tuple(self.draw.random() for _ in range(self.dimensions))

    def ask(self):
        return self.point

    def tell(self, point, value):
        self.point = self.drawn()


class Restless(Sound):
    def ask(self):
        return self.drawn()


class Beyond(Sound):
    def drawn(self):
        return tuple(2 * part for part in super().drawn())


class Flat(Sound):
    def drawn(self):
        return super().drawn()[:1]


class Listed(Sound):
    def drawn(self):
        return list(super().drawn())


class Unseeded(Sound):
    def __init__(self, dimensions, seed):
        super().__init__(dimensions, None)


class Proud(Sound):
    """Hears only of what it has proposed."""

    def tell(self, point, value):
        if point != self.point:
            raise KeyError(point)
        super().tell(point, value)


class Stuck(Sound):
    def drawn(self):
        return (0.0,) * self.dimensions


def test_a_sound_search_passes():
    check_search(Sound)
    check_search(lambda dimensions, seed: Grid.random(dimensions, seed), dimensions=1, within=0.01)


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (Restless, "asked again before it is told anything"),
        (Beyond, "expected numbers from 0 to 1"),
        (Flat, "expected [23] numbers"),
        (Listed, "expected a tuple"),
        (Unseeded, "seed 0: two searches that are told the same propose"),
        (Proud, r"told that an iteration took .* at \(0.5,\), it raises KeyError"),
        (Stuck, "no point within 5% of the best is tried in 300 trials"),
    ],
)
def test_a_broken_promise_is_found_and_named(start, reason):
    with pytest.raises(AssertionError, match=reason):
        check_search(start)
