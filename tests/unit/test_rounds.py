"""Iterations that belong to one optimizer step, and sessions that try plans one after another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradlane.live.adapt.search_turns import SearchTurns
from gradlane.planning.rounds import Round, Rounds


def test_a_critic_s_two_passes_are_one_round_and_a_plain_loop_has_a_round_a_pass():
    rounds = Rounds()
    assert rounds.observe(10, 1, stepped=True) == Round(10, 1)
    assert rounds.observe(20, 2, stepped=False) is None
    assert rounds.observe(10, 1, stepped=True) == Round(30, 3, passes=2)
    assert rounds.observe(7, 0, stepped=True) == Round(7)


def test_a_script_that_never_steps_has_a_round_a_pass():
    rounds = Rounds()
    assert [rounds.observe(5, 0, stepped=False) for _ in range(3)] == [Round(5)] * 3


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100), st.booleans())))
def test_no_time_and_no_pass_is_lost_and_a_round_is_bounded(iterations):
    rounds = Rounds()
    ended = [each for iteration in [*iterations, (0, 0, True)] if (each := rounds.observe(*iteration)) is not None]
    assert sum(each.took_ns for each in ended) == sum(took_ns for took_ns, _, _ in iterations)
    assert sum(each.blocked_ns for each in ended) == sum(blocked_ns for _, blocked_ns, _ in iterations)
    assert sum(each.passes for each in ended) == len(iterations) + 1
    assert all(each.passes <= 16 for each in ended)


def test_one_session_tries_at_a_time_and_one_that_trains_no_more_loses_its_turn():
    turns, generator, critic = SearchTurns(), object(), object()
    for _ in range(20):  # both train
        assert turns.take(generator)
        assert not turns.take(critic)
    assert [turns.take(critic) for _ in range(8)] == [False] * 7 + [True]
    turns.leave(generator)  # has no turn to end
    assert not turns.take(generator)
    turns.leave(critic)
    assert turns.take(generator)


def test_a_session_hears_of_changes_of_others_only():
    turns, generator, critic = SearchTurns(), object(), object()
    turns.note_change(generator)
    assert turns.changes_of_others(generator, 0) == (1, False)
    assert turns.changes_of_others(critic, 0) == (1, True)
    assert turns.changes_of_others(critic, 1) == (1, False)
