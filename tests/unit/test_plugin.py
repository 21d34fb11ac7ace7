from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane import policies
from gradlane.core.plan import Lane, Message, Plan, Slice
from gradlane.core.profile import TensorSpec
from gradlane.errors import CommunicationError, PeerDied
from gradlane.plugin import Core
from gradlane.testing.generators import networks, profiles

PLAN = Plan(
    "by-hand",
    "two",
    (TensorSpec("last", 16), TensorSpec("first", 8)),
    (Message((Slice(0, 0, 8),), priority=1), Message((Slice(0, 8, 8),), priority=1), Message((Slice(1, 0, 8),), priority=0)),
    (Lane(window_bytes=8),),
    crosses_barrier=True,
)


class ByHand:
    """A summation whose messages end when a test says so."""

    def __init__(self, at_once: bool = False) -> None:
        self.started: list[int] = []
        self.at_once = at_once

    def partition(self, plan: Plan, core: Core) -> None:
        self.plan, self.core = plan, core

    def start(self, message: int) -> None:
        self.started.append(message)
        if self.at_once:
            self.core.notify_finish(message)


def test_the_framework_says_what_is_ready_and_finished_and_the_core_what_starts():
    summation = ByHand()
    core = Core(PLAN, summation)
    assert summation.plan is PLAN
    core.begin()
    core.notify_ready(0)
    assert summation.started == [0]
    core.notify_ready(1)
    assert summation.started == [0]  # the window is full
    core.notify_finish(0)
    assert summation.started == [0, 2]  # the first layer's goes before the rest of the last one's
    assert not core.has_arrived(0)
    core.notify_finish(2)
    core.wait(1, timeout_s=0)
    assert summation.started == [0, 2, 1]
    core.notify_finish(1)
    core.wait_for_all(timeout_s=0)
    core.begin()
    assert core.iteration == 1
    assert not core.has_arrived(1)


def test_what_has_been_sent_leaves_its_window_before_its_sum_is_there():
    summation = ByHand()
    core = Core(PLAN, summation)
    core.begin()
    core.notify_ready(0)
    core.notify_sent(0)
    assert summation.started == [0, 1]
    assert not core.has_arrived(0)
    core.notify_finish(0)
    assert summation.started == [0, 1]
    core.notify_finish(1)
    assert core.has_arrived(0)


def test_a_message_may_end_inside_of_its_start():
    summation = ByHand(at_once=True)
    core = Core(PLAN, summation)
    for _ in range(3):
        summation.started.clear()
        core.begin()
        core.notify_ready(0)
        core.notify_ready(1)
        assert summation.started == [0, 1, 2]
        core.wait_for_all(timeout_s=0)


def test_a_wait_ends_when_another_thread_finishes_the_message():
    summation = ByHand()
    core = Core(PLAN, summation)
    core.begin()
    core.notify_ready(1)
    other = threading.Thread(target=core.notify_finish, args=(2,))
    other.start()
    core.wait(1, timeout_s=30)
    other.join()
    assert core.has_arrived(1)


def test_a_wait_without_an_end_names_the_tensor_and_what_is_under_way():
    core = Core(PLAN, ByHand())
    core.begin()
    core.notify_ready(1)
    with pytest.raises(CommunicationError, match=r"iteration 0: no sum of first within 0 s; .*under way: \[2\]"):
        core.wait(1, timeout_s=0)


def test_a_failure_ends_every_wait_and_every_later_call_and_the_first_stands():
    core = Core(PLAN, ByHand())
    core.begin()
    core.notify_failure(PeerDied("rank 1 is gone", 1))
    core.notify_failure(PeerDied("rank 2 is gone", 2))
    for call in (core.begin, lambda: core.notify_ready(0), lambda: core.wait(0)):
        with pytest.raises(PeerDied, match="rank 1"):
            call()


@pytest.mark.slow
@pytest.mark.parametrize("name", policies.names("server"))
@settings(max_examples=15, deadline=None)
@given(profile=profiles(), network=networks(), data=st.data())
def test_every_message_of_every_plan_is_started_once_in_whatever_order_messages_end(name, profile, network, data):
    summation = ByHand()
    core = Core(policies.get(name).plan(profile, network), summation)
    for _ in range(2):
        summation.started.clear()
        core.begin()
        under_way: list[int] = []
        known = 0
        for tensor in range(len(profile.tensors)):
            core.notify_ready(tensor)
            under_way += summation.started[known:]
            known = len(summation.started)
            if under_way and data.draw(st.booleans()):
                core.notify_finish(under_way.pop(data.draw(st.integers(0, len(under_way) - 1))))
                under_way += summation.started[known:]
                known = len(summation.started)
        while under_way:
            core.notify_finish(under_way.pop(data.draw(st.integers(0, len(under_way) - 1))))
            under_way += summation.started[known:]
            known = len(summation.started)
        core.wait_for_all(timeout_s=0)
        # a two-phase message once for each half
        assert sorted(summation.started) == sorted([*range(len(core.plan.messages)), *core.plan.second_phases])
