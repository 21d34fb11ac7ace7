"""What every search over knobs promises.

def test_my_search() -> None:
    check_search(lambda dimensions, seed: MySearch(dimensions, seed))
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from hypothesis import strategies as st

from gradlane.planning.search import Point, Search
from gradlane.testing.generators import holds_for

Start = Callable[[int, int], Search]
"""The search at its beginning, of so many dimensions, with a seed for whatever it draws."""

AT_MOST = 300
"""Trials after which `tries_until_within` gives up."""
_BEST = 100.0
_FOR_THREE_DIMENSIONS = (0.7, 0.2, 0.5)


def bowl(point: Point) -> float:
    """An iteration time: 100 at (0.7, 0.2, 0.5), and more by e^(0.4 distance) away from it.

    Args:
        point: of 1 to 3 dimensions; those that it does not have do not count.
    """
    return _BEST * math.exp(0.4 * math.dist(point, _FOR_THREE_DIMENSIONS[: len(point)]))


def tries_until_within(
    search: Search, value: Callable[[Point], float], share: float, noise: float = 0.0, seed: int = 0, dimensions: int = 2
) -> int:
    """Trials until `search` tries a point whose value, without the noise, is at most 100 (1 +
    share).

    Args:
        search: at its beginning, or told something already.
        value: of a point; 100 at its best.
        share: how near to 100 is near enough: 0.05 is 5 %.
        noise: standard deviation of the logarithm of what the search is told.
        seed: of the noise.
        dimensions: of the points.

    Returns:
        Trials, `AT_MOST` where no such point was tried.

    Raises `AssertionError` where a proposal is no point of the unit cube, or changes before its
    value is told.
    """
    draw = random.Random(seed)
    for tried in range(1, AT_MOST + 1):
        point = _asked(search, dimensions)
        _tell(search, point, value(point) * math.exp(draw.gauss(0, noise)))
        if value(point) <= _BEST * (1 + share):
            return tried
    return AT_MOST


def check_search(start: Start, *, dimensions: int = 2, within: float = 0.05, examples: int = 10) -> None:
    """Raise `AssertionError` unless searches that `start` begins keep every promise of a search.

    - What is proposed is a point of the unit cube, the same until something is told.
    - Searches with the same seed that are told the same propose the same, whenever they run.
    - Any value above 0 may be told, and of any point, proposed or not.
    - A point whose value is within 5 % of the best is found in fewer than `AT_MOST` trials, where
      what is told has noise of 2 % (`bowl`, three seeds).

    Args:
        start: begins a search of so many dimensions, with a seed.
        dimensions: for which a good point is to be found, 1 to 3; the other promises are checked
            for 1, 2 and 3.
        within: how good a point is to be found: 0.05 is 5 % above the best.
        examples: sequences of values drawn.
    """

    def check(count: int, seed: int, values: list[float]) -> None:
        search = start(count, seed)
        for value in values:
            _tell(search, _asked(search, count), value)
        _tell(search, (0.5,) * count, values[0])  # as of what the script began with
        _asked(search, count)

    values = st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=4)
    holds_for(examples, check, count=st.integers(1, 3), seed=st.integers(0, 9), values=values)
    for seed in range(3):
        trials = [_trials(start, dimensions, seed) for _ in range(2)]
        assert trials[0] == trials[1], f"seed {seed}: two searches that are told the same propose {trials[0]} and {trials[1]}"
        tries = tries_until_within(start(dimensions, seed), bowl, within, noise=0.02, seed=seed, dimensions=dimensions)
        assert tries < AT_MOST, f"seed {seed}: no point within {within:.0%} of the best is tried in {AT_MOST} trials"


def _trials(start: Start, dimensions: int, seed: int) -> list[Point]:
    search = start(dimensions, seed)
    found = []
    for _ in range(8):
        found.append(_asked(search, dimensions))
        _tell(search, found[-1], bowl(found[-1]))
    return found


def _asked(search: Search, dimensions: int) -> Point:
    """What `search` proposes. Raises `AssertionError` where that is no point, or asked again
    another.
    """
    point = search.ask()
    assert isinstance(point, tuple), f"got {point!r}, expected a tuple of {dimensions} numbers"
    assert len(point) == dimensions, f"got {point!r}, expected {dimensions} numbers"
    assert all(0 <= part <= 1 for part in point), f"got {point!r}, expected numbers from 0 to 1"
    again = search.ask()
    assert again == point, f"asked again before it is told anything, {point!r} has become {again!r}"
    return point


def _tell(search: Search, point: Point, value: float) -> None:
    try:
        search.tell(point, value)
    except Exception as error:
        raise AssertionError(f"told that an iteration took {value:g} at {point}, it raises {error!r}") from error
