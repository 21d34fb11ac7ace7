"""A rank that slows the job is named, and a job that is slow on all ranks names nobody."""

from __future__ import annotations

import random

import pytest

from gradlane.live.comm.stragglers import WINDOW, BusyTimes, Slowest, Straggler, Stragglers

pytestmark = pytest.mark.matrix

MS = 1000


def named(ranks: int, windows: list[list[list[int]]]) -> list[list[Straggler]]:
    """Who is named after each window, which has each rank's times."""
    judge = Stragglers(range(ranks))
    found = []
    for number, window in enumerate(windows):
        found.append([one for rank, times in enumerate(window) for one in judge.report(rank, number, times)])
    return found


def steady(*of_rank: int) -> list[list[int]]:
    return [[busy] * WINDOW for busy in of_rank]


def test_a_rank_that_takes_twice_as_long_is_named_after_five_steps_if_they_take_two_seconds_and_once():
    found = Straggler(2, 400 * MS, 100 * MS, 5)
    assert named(3, [steady(100 * MS, 100 * MS, 400 * MS)] * 50) == [[found], *[[]] * 49]


def test_where_steps_are_short_it_is_named_after_two_seconds():
    assert named(2, [steady(40 * MS, 10 * MS)] * 11) == [*[[]] * 9, [Straggler(0, 40 * MS, 10 * MS, 50)], []]


def test_a_rank_that_takes_a_third_longer_is_named_after_twenty_steps():
    assert named(2, [steady(670 * MS, 500 * MS)] * 5) == [[], [], [], [Straggler(0, 670 * MS, 500 * MS, 20)], []]


def test_two_of_four_that_are_slow_are_both_named():
    (found,) = named(4, [steady(100 * MS, 400 * MS, 100 * MS, 500 * MS)])
    assert {(one.rank, one.others_us) for one in found} == {(1, 100 * MS), (3, 100 * MS)}


def test_who_keeps_up_again_may_be_named_again():
    slow, alike = steady(100 * MS, 400 * MS), steady(100 * MS, 100 * MS)
    assert [bool(found) for found in named(2, [slow, *[alike] * 19, slow, *[alike] * 20, slow])] == [
        True, *[False] * 40, True,
    ]  # fmt: skip


def test_the_rank_that_is_busy_for_longest_is_known_once_all_have_reported():
    judge = Stragglers([4, 7])
    judge.report(0, 0, [10 * MS] * WINDOW)
    assert judge.slowest is None
    judge.report(1, 0, [9 * MS, 12 * MS, 12 * MS, 12 * MS, 90 * MS])
    assert judge.slowest == Slowest(7, 12 * MS)
    judge.report(0, 1, [20 * MS] * WINDOW)
    judge.report(1, 1, [10 * MS] * WINDOW)
    assert judge.slowest == Slowest(4, 20 * MS)


def test_a_processor_that_is_away_for_a_second_names_nobody():
    alike, away = steady(10 * MS, 10 * MS), steady(100 * MS, 10 * MS)
    assert named(2, [alike, away, away, alike] * 20) == [[]] * 80


@pytest.mark.parametrize(
    "window",
    [
        steady(500 * MS, 500 * MS),
        steady(10 * MS, 11 * MS),  # a tenth longer
        steady(100, 900),  # of less than a millisecond a step
        [[10 * MS] * WINDOW, [10 * MS, 10 * MS, 900 * MS, 10 * MS, 10 * MS]],  # one long step: a checkpoint
        [[10 * MS, 80 * MS] * 2 + [9 * MS], [10 * MS, 81 * MS] * 2 + [9 * MS]],  # all vary together
    ],
)
def test_nobody_is_named(window):
    assert named(2, [window] * 100) == [[]] * 100


def test_noise_that_is_alike_on_all_ranks_names_nobody():
    noise = random.Random(3)

    def window() -> list[list[int]]:
        return [[round(noise.lognormvariate(13, 0.3)) for _ in range(WINDOW)] for _ in range(4)]

    assert named(4, [window() for _ in range(2000)]) == [[]] * 2000


def test_a_rank_alone_makes_nobody_wait():
    assert named(1, [steady(10 * MS)] * 3) == [[]] * 3


def test_reports_that_never_become_whole_are_not_kept():
    judge = Stragglers(range(2))
    for window in range(10_000):
        judge.report(1, window, [0] * WINDOW)
    assert len(judge._reports) <= 5


def test_waiting_is_no_work():
    reports = []
    times = BusyTimes(lambda window, busy_us: reports.append((window, list(busy_us))))
    for step in range(11):  # of 100 ms, 70 of which are waited for
        times.step(step * 100_000_000, step * 70_000_000)
    assert reports == [(0, [30 * MS] * WINDOW), (1, [30 * MS] * WINDOW)]


def test_the_line_has_the_rank_and_what_it_costs():
    assert str(Straggler(2, 45_020, 20_100, 20)).startswith(
        "rank 2 slows the job, for 20 steps now: in the last 5 it was busy for 45.0 ms a step and the other ranks for 20.1 ms "
        "(medians), so that they wait for it for up to 24.9 ms a step;"
    )


@pytest.mark.timing
@pytest.mark.parametrize("backend", ["all-reduce", "server"])
def test_a_job_names_its_slow_rank_on_rank_0_and_nobody_if_all_are_slow(four_ranks, backend):
    job = "tests.live.faults:a_slow_rank"
    (line,), *silent = four_ranks.run(job, backend=backend, slow={2: 0.25}, steps=12)
    assert line.startswith("gradlane: rank 2 slows the job, for 10 steps now: in the last 5 it was busy for 2")
    assert silent == [[]] * 3
    alike = dict.fromkeys(range(4), 0.25)
    assert four_ranks.run(job, backend=backend, slow=alike, steps=12) == [[]] * 4
