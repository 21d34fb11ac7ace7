"""How many times as fast: paired turns say it where medians of disturbed times do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlane.core.records.speedup import Speedup, disturbed, turn_times
from gradlane.errors import InputError

MS = 10**6
TIMES = st.lists(st.tuples(*[st.integers(1, 10**12)] * 3), min_size=1, max_size=20)


def test_it_is_the_median_of_ratios_of_turns_and_their_quartiles():
    found = Speedup.of([12, 11, 10, 14, 13], [10] * 5)
    assert (found.ratio, found.low, found.high, found.turns) == (1.2, 1.1, 1.3, 5)
    assert str(found) == "1.20 times as fast (1.10..1.30 in 5 turns)"
    assert str(Speedup.of([3], [2])) == "1.50 times as fast (1.50..1.50 in 1 turn)"


def test_few_turns_give_the_whole_range_and_of_two_in_the_middle_the_lower():
    assert Speedup.of([107, 10], [1, 10]) == Speedup(1.0, 1.0, 107.0, 2)
    assert Speedup.of([1, 2, 3, 4], [1] * 4) == Speedup(2.0, 1.0, 4.0, 4)


def test_one_turn_of_a_hundred_times_as_long_changes_nothing():
    steady = Speedup.of([15.0] * 5, [10.0] * 5)
    assert Speedup.of([15.0, 1500.0, 15.0, 15.0, 15.0], [10.0] * 5) == steady
    assert Speedup.of([15.0] * 5, [10.0, 10.0, 1000.0, 10.0, 10.0]) == steady


def test_what_slows_down_both_of_a_turn_changes_nothing_though_medians_are_apart():
    slowed = [1.0, 2.0, 5.0, 1.0, 3.0]
    found = Speedup.of([1.5 * by for by in slowed], slowed)
    assert found == Speedup(1.5, 1.5, 1.5, 5)


@given(TIMES)
def test_what_is_shorter_in_each_turn_has_the_larger_ratio(turns):
    """So a bound of the same turns is never below what it bounds."""
    baseline, own, less = zip(*((base, max(pair), min(pair)) for base, *pair in turns), strict=True)
    of_own, bound = Speedup.of(baseline, own), Speedup.of(baseline, less)
    assert of_own.low <= bound.low
    assert of_own.ratio <= bound.ratio
    assert of_own.high <= bound.high
    assert of_own.low <= of_own.ratio <= of_own.high


def test_without_a_pair_there_is_no_speedup():
    with pytest.raises(InputError, match="turns: got 0, expected at least one of both"):
        Speedup.of([], [1])


def test_a_turn_is_the_median_of_its_steps():
    assert turn_times([1, 2, 900, 4, 5, 6], 2) == [2, 5]
    with pytest.raises(InputError, match=r"step_ns: their number: got 3, expected a multiple of 2 turns"):
        turn_times([1, 2, 3], 2)


def test_turns_that_differ_by_a_quarter_are_disturbed():
    assert disturbed([10 * MS, 12.5 * MS]) is None
    assert disturbed([10 * MS, 12.6 * MS, 11 * MS]) == "disturbed: 3 turns took 10.00 ms to 12.60 ms a step"
