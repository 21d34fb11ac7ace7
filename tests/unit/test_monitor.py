from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gradlane.core.network import Network
from gradlane.core.plan import Message, Plan, Slice
from gradlane.core.profile import TensorSpec
from gradlane.planning.monitor import (
    CROWD_PATIENCE,
    CROWDED,
    LEARN,
    LONG_PATIENCE,
    PATIENCE,
    Crowd,
    Drift,
    Monitor,
    Moved,
    Observed,
    observe,
    slowed,
)
from gradlane.planning.pattern import shift_of, with_pattern
from gradlane.planning.rounds import Round
from gradlane.testing.generators import profile_of, profiles

MS = 10**6
NETWORK = Network.line(2, startup_ns=MS, bytes_per_second=10**6)  # 1 ms + 1 us a byte
PLAN = Plan("p", "m", (TensorSpec("t", 16_000),), tuple(Message((Slice(0, 4000 * n, 4000),)) for n in range(4)))  # 5 ms each

factors = st.floats(0.05, 20)


def spans(*sent):
    """Rows of messages (message, start, end) in ms."""
    return [("send", 0, message, round(start * MS), round(end * MS)) for message, start, end in sent]


def test_messages_that_take_what_was_planned_are_as_fast_as_planned():
    seen = observe(spans((0, 0, 5), (1, 5, 10), (2, 20, 25), (3, 25, 30)), PLAN, NETWORK, Round(100 * MS))
    assert seen == Observed(100 * MS, 100 * MS, 1.0)


def test_messages_side_by_side_count_as_long_as_the_network_is_busy():
    assert observe(spans((0, 0, 20), (1, 0, 20)), PLAN, NETWORK, Round(40 * MS)).slowness == 2.0


def test_a_burst_that_began_with_waiting_for_another_rank_does_not_count_where_others_are_faster():
    seen = observe(spans((0, 0, 50), (1, 50, 55), (2, 60, 65), (3, 70, 75)), PLAN, NETWORK, Round(100 * MS))
    assert seen.slowness == 1.0


def test_a_message_is_under_way_until_it_has_come_back_and_waiting_is_not_computing():
    rows = [("send", 0, 0, 0, 5 * MS), ("receive", 0, 0, 5 * MS, 10 * MS)]
    assert observe(rows, PLAN, NETWORK, Round(30 * MS, blocked_ns=2 * MS)) == Observed(30 * MS, 28 * MS, 2.0)


def test_a_network_that_is_hardly_used_says_nothing():
    assert observe(spans((0, 0, 5)), PLAN, NETWORK, Round(200 * MS)).slowness is None
    assert observe([], PLAN, NETWORK, Round(200 * MS)) == Observed(200 * MS, 200 * MS, None)


@given(factor=factors, starts=st.lists(st.integers(0, 100), min_size=4, max_size=4))
def test_a_network_so_many_times_as_slow_is_told_whatever_the_pauses(factor, starts):
    now, sent = 0.0, []
    for message, pause in enumerate(starts):
        sent.append((message, now + pause, now + pause + 5 * factor))
        now = sent[-1][2]
    assume(20 * factor > 0.06 * now)
    assert observe(spans(*sent), PLAN, NETWORK, Round(round(now * MS))).slowness == pytest.approx(factor, rel=1e-5)


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
    factor, iteration_ns = (1 / factor, 90 * MS) if faster else (factor, 110 * MS)
    monitor = Monitor()
    before, after = Observed(100 * MS, 50 * MS, 1.0), Observed(iteration_ns, 50 * MS, factor)
    told = [monitor.observe(seen) for seen in [before] * 20 + [after] * PATIENCE]
    assert told == [None] * (20 + PATIENCE - 1) + [Moved(network=factor)]
    monitor = Monitor(100 * MS)
    assert not any(monitor.observe(after) for _ in range(50))


@given(st.integers(0, LEARN), st.floats(1.41, 50))
def test_a_network_that_slows_while_normal_is_learned_after_another_change_is_told(before, factor):
    usual, slow = Observed(100 * MS, 50 * MS, 1.0), Observed(200 * MS, 50 * MS, factor)
    monitor = Monitor()
    assert not any(monitor.observe(usual) for _ in range(LEARN))
    for _ in range(2):  # such a change may come again before anything else was learned
        monitor = monitor.under_another_plan(Moved(pattern=0.2))
    told = [monitor.observe(seen) for seen in [usual] * before + [slow] * PATIENCE]
    assert told == [None] * (before + PATIENCE - 1) + [Moved(network=factor)]
    monitor = monitor.under_another_plan(Moved(network=factor, pattern=0.2))
    assert not any(monitor.observe(slow) for _ in range(50))


@given(st.floats(1 / 50, 50), st.floats(0.96, 1.04))
def test_a_network_that_changes_where_iterations_do_not_is_no_change(factor, felt):
    monitor = Monitor(100 * MS)
    usual, hidden = Observed(100 * MS, 50 * MS, 1.0), Observed(round(felt * 100 * MS), 50 * MS, factor)
    assert not any(monitor.observe(seen) for seen in [usual] * LEARN + [hidden] * 50)


def test_computing_that_lasts_longer_behind_a_wait_is_no_change_for_a_few_slow_iterations():
    monitor = Monitor(100 * MS)
    usual, hidden, slow = (Observed(took * MS, compute * MS, None) for took, compute in ((100, 20), (114, 40), (120, 40)))
    seen = [usual] * LEARN + ([hidden] + [slow] * (LONG_PATIENCE - 1)) * 10
    assert not any(monitor.observe(each) for each in seen)
    assert monitor.observe(hidden) is None
    assert [monitor.observe(slow) for _ in range(LONG_PATIENCE)][-1] == Moved(compute=2.0)


def test_iterations_that_change_the_other_way_do_not_tell_of_the_network():
    monitor = Monitor(100 * MS)
    usual, other = Observed(100 * MS, 50 * MS, 1.0), Observed(130 * MS, 50 * MS, 0.3)
    assert not any(monitor.observe(seen) for seen in [usual] * LEARN + [other] * 50)


def test_a_rate_that_goes_up_and_down_faster_than_patience_is_no_change():
    monitor = Monitor()
    fast, slow = Observed(100 * MS, 50 * MS, 1.0), Observed(120 * MS, 50 * MS, 4.0)
    assert not any(monitor.observe(seen) for seen in [fast] * LEARN + ([slow] * (PATIENCE - 1) + [fast]) * 20)


def test_what_moved_is_said():
    assert str(Moved(network=4.0, iteration=2.5)) == "messages take 4.00 times as long and iterations take 2.50 times as long"
    assert str(Moved(compute=2.0)) == "computing takes 2.00 times as long"


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


# -- other work on the machine ------------------------------------------------------------------------------


def test_a_machine_is_crowded_where_more_waits_for_a_processor_than_is_normal_there_until_that_is_how_it_is():
    crowd = Crowd()
    assert not any(crowd.observe(0.1) for _ in range(LEARN + 10))
    assert not crowd.observe(0.1 + CROWDED * 0.9)
    assert [crowd.observe(0.9) for _ in range(3)] == [True] * 3
    assert not crowd.observe(0.1)
    assert [crowd.observe(0.9) for _ in range(CROWD_PATIENCE + 2)] == [True] * CROWD_PATIENCE + [False] * 2
    assert not any(crowd.observe(0.9) for _ in range(LEARN + 50))


def test_where_the_kernel_does_not_count_nothing_is_crowded():
    crowd = Crowd()
    assert not any(crowd.observe(None) for _ in range(100))


# -- the model's pattern ------------------------------------------------------------------------------------

FORWARD = ("a", "b", "c")  # layers; the last has its gradient first


def ready_in(order):
    """Layers whose gradients become ready in that order, 30 ms apart."""
    return profile_of(
        *((30 * MS * (place + 1), 4000) for place in range(len(order))),
        names=[f"{name}.weight" for name in order],
        layers=[FORWARD.index(name) for name in order],
        forward_ns=10 * MS,
        backward_ns=100 * MS,
    )


def ready_rows(ready_ms):
    return [("backward", 0, -1, 0, 100 * MS)] + [("ready", 0, at, ms * MS, ms * MS) for at, ms in enumerate(ready_ms)]


def test_readiness_is_told_as_a_part_of_the_backward_pass_and_left_out_where_it_was_not_seen():
    plan = Plan("p", "m", ready_in("cba").specs, tuple(Message((Slice(at, 0, 4000),)) for at in range(3)))
    seen = observe(ready_rows([30, 60]), plan, NETWORK, Round(200 * MS))
    assert seen.ready == {"c.weight": 0.3, "b.weight": 0.6}


def test_gradients_that_become_ready_at_other_times_for_long_enough_have_moved():
    profile, monitor = ready_in("cba"), Monitor()
    usual = {"c.weight": 0.32, "b.weight": 0.58, "a.weight": 0.9}
    other = {"c.weight": 0.9, "b.weight": 0.6, "a.weight": 0.3}
    assert shift_of(profile, usual) == pytest.approx(0.04 / 3)
    assert shift_of(profile, other) == pytest.approx(0.4)
    assert shift_of(profile, {"a.weight": 0.9}) == pytest.approx(0.0)
    iteration = Observed(200 * MS, 100 * MS, None)
    told = [monitor.observe(iteration, shift_of(profile, seen)) for seen in [usual] * 20 + [other] * LONG_PATIENCE]
    assert told[:-1] == [None] * (20 + LONG_PATIENCE - 1)
    assert told[-1].pattern == pytest.approx(0.4)
    assert str(told[-1]) == "gradients are ready 40% of a backward pass earlier or later"


def test_a_profile_with_another_pattern_has_the_times_and_layers_that_belong_to_it():
    profile = ready_in("cba")
    moved = with_pattern(profile, {"c.weight": 0.9, "b.weight": 0.6, "a.weight": 0.3})
    assert [(seen.spec.name, seen.ready_ns) for seen in moved.tensors] == [
        ("a.weight", 30 * MS), ("b.weight", 60 * MS), ("c.weight", 90 * MS),
    ]  # fmt: skip
    assert [layer.name for layer in moved.layers] == ["l2", "l1", "l0"]
    assert [moved.layers[seen.layer].name for seen in moved.tensors] == ["l0", "l1", "l2"]
    assert (moved.compute_ns, moved.size_bytes) == (profile.compute_ns, profile.size_bytes)


@pytest.mark.slow
@given(profiles(), st.data())
def test_a_profile_is_itself_with_its_own_pattern_and_keeps_its_bytes_and_times_with_any(profile, data):
    assume(profile.backward_ns)
    names = [seen.spec.name for seen in profile.tensors]
    ready = data.draw(st.fixed_dictionaries({name: st.floats(0, 1) for name in names}))
    moved = with_pattern(profile, ready)
    assert (moved.compute_ns, moved.size_bytes) == (profile.compute_ns, profile.size_bytes)
    assert shift_of(moved, ready) <= 1 / profile.backward_ns
    own = with_pattern(profile, {seen.spec.name: seen.ready_ns / profile.backward_ns for seen in profile.tensors})
    assert (
        shift_of(profile, {seen.spec.name: seen.ready_ns / own.backward_ns for seen in own.tensors}) <= 1 / profile.backward_ns
    )
