from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gradlane.core.network import Network
from gradlane.core.plan import Message, Plan, Slice
from gradlane.core.profile import TensorSpec
from gradlane.tune.monitor import LEARN, LONG_PATIENCE, PATIENCE, Drift, Monitor, Moved, Observed, observe, slowed

MS = 10**6
NETWORK = Network.line(2, startup_ns=MS, bytes_per_second=10**6)  # 1 ms + 1 us a byte
PLAN = Plan("p", "m", (TensorSpec("t", 16_000),), tuple(Message((Slice(0, 4000 * n, 4000),)) for n in range(4)))  # 5 ms each

factors = st.floats(0.05, 20)


def spans(*sent):
    """Rows of messages (message, start, end) in ms."""
    return [("send", 0, message, round(start * MS), round(end * MS)) for message, start, end in sent]


def test_messages_that_take_what_was_planned_are_as_fast_as_planned():
    seen = observe(spans((0, 0, 5), (1, 5, 10), (2, 20, 25), (3, 25, 30)), PLAN, NETWORK, 100 * MS)
    assert seen == Observed(100 * MS, 100 * MS, 1.0)


def test_messages_side_by_side_count_as_long_as_the_network_is_busy():
    assert observe(spans((0, 0, 20), (1, 0, 20)), PLAN, NETWORK, 40 * MS).slowness == 2.0


def test_a_burst_that_began_with_waiting_for_another_rank_does_not_count_where_others_are_faster():
    seen = observe(spans((0, 0, 50), (1, 50, 55), (2, 60, 65), (3, 70, 75)), PLAN, NETWORK, 100 * MS)
    assert seen.slowness == 1.0


def test_a_message_is_under_way_until_it_has_come_back_and_waiting_is_not_computing():
    rows = [("send", 0, 0, 0, 5 * MS), ("receive", 0, 0, 5 * MS, 10 * MS), ("wait", 0, -1, 8 * MS, 10 * MS)]
    assert observe(rows, PLAN, NETWORK, 30 * MS) == Observed(30 * MS, 28 * MS, 2.0)


def test_a_network_that_is_hardly_used_says_nothing():
    assert observe(spans((0, 0, 5)), PLAN, NETWORK, 200 * MS).slowness is None
    assert observe([], PLAN, NETWORK, 200 * MS) == Observed(200 * MS, 200 * MS, None)


@given(factor=factors, starts=st.lists(st.integers(0, 100), min_size=4, max_size=4))
def test_a_network_so_many_times_as_slow_is_told_whatever_the_pauses(factor, starts):
    now, sent = 0.0, []
    for message, pause in enumerate(starts):
        sent.append((message, now + pause, now + pause + 5 * factor))
        now = sent[-1][2]
    assume(20 * factor > 0.06 * now)
    assert observe(spans(*sent), PLAN, NETWORK, round(now * MS)).slowness == pytest.approx(factor, rel=1e-5)


def fed(drift, values):
    return [drift.observe(value) for value in values]


def test_a_step_is_told_after_as_many_values_as_patience_asks_for_and_for_as_long_as_it_lasts():
    drift = Drift(0.3)
    assert fed(drift, [10] * (LEARN + 10)) == [None] * (LEARN + 10)
    assert fed(drift, [40] * (PATIENCE + 2)) == [None] * (PATIENCE - 1) + [4.0] * 3
    assert fed(drift, [10] * 3) == [None] * 3


def test_what_is_normal_may_be_given():
    assert fed(Drift(0.3, normal=20), [10] * PATIENCE)[-1] == 0.5


@given(st.lists(st.floats(1 / 1.29, 1.29), min_size=30, max_size=60), factors)
def test_noise_within_the_band_around_what_is_normal_is_never_a_move(noise, scale):
    drift = Drift(0.3, normal=scale)
    assert not any(fed(drift, [scale * value for value in noise]))


@given(st.lists(st.floats(0.01, 100), min_size=20, max_size=60))
def test_outliers_that_are_rarer_than_patience_are_never_a_move(outliers):
    drift = Drift(0.3, normal=1.0)
    values = [value for outlier in outliers for value in (*[outlier] * (PATIENCE - 1), 1.0)]
    assert not any(fed(drift, values))


@given(st.floats(1.41, 50), st.booleans())
def test_a_network_that_changes_is_told_once_and_not_again_after_settling(factor, faster):
    factor = 1 / factor if faster else factor
    monitor = Monitor()
    before, after = Observed(100 * MS, 50 * MS, 1.0), Observed(100 * MS, 50 * MS, factor)
    told = [monitor.observe(seen) for seen in [before] * 20 + [after] * PATIENCE]
    assert told == [None] * (20 + PATIENCE - 1) + [Moved(network=factor)]
    monitor = Monitor(100 * MS)
    assert not any(monitor.observe(after) for _ in range(50))


def test_a_rate_that_goes_up_and_down_faster_than_patience_is_no_change():
    monitor = Monitor()
    fast, slow = Observed(100 * MS, 50 * MS, 1.0), Observed(120 * MS, 50 * MS, 4.0)
    assert not any(monitor.observe(seen) for seen in [fast] * LEARN + ([slow] * (PATIENCE - 1) + [fast]) * 20)


def test_what_moved_is_said():
    assert str(Moved(network=4.0, iteration=2.5)) == "messages take 4.00 times as long and iterations take 2.50 times as long"


@given(factors)
def test_a_slower_network_takes_longer_for_bytes_and_as_long_for_starting(factor):
    other = slowed(NETWORK, factor)
    assert other.cost_ns(10**6) - MS == pytest.approx(factor * 10**9, rel=1e-5)
    assert other.startup_ns == MS


def test_computing_and_whole_iterations_have_to_differ_for_longer():
    usual, slow = Observed(100 * MS, 50 * MS, None), Observed(200 * MS, 100 * MS, None)
    monitor = Monitor(100 * MS)
    told = [monitor.observe(seen) for seen in [usual] * LEARN + [slow] * LONG_PATIENCE]
    assert told == [None] * (LEARN + LONG_PATIENCE - 1) + [Moved(compute=2.0, iteration=2.0)]
