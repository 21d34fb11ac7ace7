from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane.core.plan import Lane, Message, Plan, Slice
from gradlane.core.profile import TensorSpec
from gradlane.schedule import Dispatcher, NativeDispatcher
from gradlane.testing.generators import plans

# the specification and the native one have one contract
pytestmark = pytest.mark.parametrize("kind", [Dispatcher, NativeDispatcher])


def plan_of(*sizes: int, priorities: list[int] | None = None, window: int | None = None, **fields) -> Plan:
    """A message a tensor, of the given sizes in bytes."""
    specs = tuple(TensorSpec(f"t{index}", size) for index, size in enumerate(sizes))
    messages = tuple(
        Message((Slice(index, 0, size),), priorities[index] if priorities else 0) for index, size in enumerate(sizes)
    )
    return Plan("test", "test", specs, messages, (Lane(window),), **fields)


def order_of_bytescheduler(kind, window: int) -> list[int]:
    """§4.2: while tensor 1 is sent, 2, 3 and 4 arrive, each more urgent than the last. Tensors count from 1."""
    dispatcher = kind(plan_of(4, 4, 4, 4, priorities=[3, 2, 1, 0], window=window))
    dispatcher.begin()
    order = [message for tensor in range(4) for message in dispatcher.ready(tensor)]
    for message in order:
        order += dispatcher.finished(message)
    return [message + 1 for message in order]


def test_a_window_of_one_slice_gives_the_stop_and_wait_order_of_the_paper(kind):
    assert order_of_bytescheduler(kind, window=4) == [1, 4, 3, 2]


def test_a_window_of_two_slices_gives_the_credit_order_of_the_paper(kind):
    assert order_of_bytescheduler(kind, window=8) == [1, 2, 4, 3]


def test_without_a_window_each_message_starts_as_it_becomes_ready(kind):
    dispatcher = kind(plan_of(4, 4, 4, priorities=[2, 1, 0]))
    dispatcher.begin()
    assert [dispatcher.ready(tensor) for tensor in (1, 0, 2)] == [[1], [0], [2]]


def test_equal_priorities_start_in_the_order_of_eligibility(kind):
    dispatcher = kind(plan_of(4, 4, 4, 4, window=4))
    dispatcher.begin()
    assert [dispatcher.ready(tensor) for tensor in (3, 1, 2, 0)] == [[3], [], [], []]
    assert [dispatcher.finished(message) for message in (3, 1, 2, 0)] == [[1], [2], [0], []]


def test_a_message_larger_than_the_window_goes_when_it_is_alone_and_only_then(kind):
    dispatcher = kind(plan_of(4, 100, 4, priorities=[0, 1, 2], window=8))
    dispatcher.begin()
    assert dispatcher.ready(0) == [0]
    assert dispatcher.ready(1) == []
    assert dispatcher.finished(0) == [1]
    assert dispatcher.ready(2) == []
    assert dispatcher.finished(1) == [2]


def test_what_would_fit_does_not_pass_the_head_that_does_not(kind):
    dispatcher = kind(plan_of(8, 8, 4, priorities=[0, 1, 2], window=12))
    dispatcher.begin()
    assert dispatcher.ready(0) == [0]
    assert dispatcher.ready(1) == []
    assert dispatcher.ready(2) == []  # 8 + 4 bytes would fit
    assert dispatcher.finished(0) == [1, 2]


def test_a_held_message_waits_for_a_tensor_that_it_does_not_carry(kind):
    specs = (TensorSpec("a", 4), TensorSpec("b", 4))
    plan = Plan("test", "test", specs, (Message((Slice(0, 0, 4),), hold_until=1), Message((Slice(1, 0, 4),), 1)))
    dispatcher = Dispatcher(plan)
    dispatcher.begin()
    assert dispatcher.ready(0) == []
    assert dispatcher.ready(1) == [0, 1]


def test_a_merged_message_waits_for_the_last_of_its_tensors(kind):
    specs = (TensorSpec("a", 8), TensorSpec("b", 4))
    halves = Message((Slice(0, 4, 4), Slice(1, 0, 4)))
    dispatcher = kind(Plan("test", "test", specs, (halves, Message((Slice(0, 0, 4),)))))
    dispatcher.begin()
    assert dispatcher.ready(0) == [1]
    assert dispatcher.ready(1) == [0]


def test_a_sequence_is_obeyed_whatever_is_ready_and_however_urgent(kind):
    dispatcher = kind(plan_of(4, 4, 4, priorities=[0, 1, 2], sequence=(2, 0, 1)))
    dispatcher.begin()
    assert dispatcher.ready(0) == []
    assert dispatcher.ready(1) == []
    assert dispatcher.ready(2) == [2, 0, 1]


def test_lanes_have_windows_and_sequences_of_their_own(kind):
    specs = tuple(TensorSpec(name, 4) for name in "abcd")
    messages = tuple(Message((Slice(index, 0, 4),), lane=index % 2) for index in range(4))
    dispatcher = kind(Plan("test", "test", specs, messages, (Lane(4), Lane(None)), sequence=(2, 3, 0, 1)))
    dispatcher.begin()
    assert dispatcher.ready(0) == []
    assert dispatcher.ready(3) == [3]
    assert dispatcher.ready(2) == [2]
    assert dispatcher.ready(1) == [1]
    assert dispatcher.finished(3) == []
    assert dispatcher.finished(2) == [0]


def test_a_follower_starts_what_it_is_told_once_that_is_ready(kind):
    dispatcher = kind(plan_of(4, 4, 4, priorities=[0, 1, 2]), follow=True)
    dispatcher.begin()
    assert dispatcher.ready(0) == []
    assert dispatcher.allow(2) == []
    assert dispatcher.allow(0) == []
    assert dispatcher.ready(2) == [2, 0]
    assert dispatcher.ready(1) == []
    assert dispatcher.allow(1) == [1]


def test_a_follower_does_not_heed_the_sequence_of_its_plan(kind):
    dispatcher = kind(plan_of(4, 4, sequence=(0, 1)), follow=True)
    dispatcher.begin()
    assert dispatcher.ready(0) == []
    assert dispatcher.ready(1) == []
    assert dispatcher.allow(1) == [1]


def test_begin_is_refused_while_a_message_is_under_way(kind):
    dispatcher = kind(plan_of(4, 4))
    dispatcher.begin()
    dispatcher.ready(0)
    with pytest.raises(AssertionError, match="an iteration is still under way: 2 of 2 messages unfinished, under way"):
        dispatcher.begin()


def test_begin_is_refused_when_some_messages_have_finished_and_some_not(kind):
    dispatcher = kind(plan_of(4, 4))
    dispatcher.begin()
    dispatcher.ready(0)
    dispatcher.finished(0)
    with pytest.raises(AssertionError, match="1 gradients not ready, the first t1"):
        dispatcher.begin()


def test_begin_is_refused_when_gradients_are_ready_and_nothing_has_started(kind):
    dispatcher = kind(plan_of(4, 4, sequence=(1, 0)))
    dispatcher.begin()
    assert dispatcher.ready(0) == []
    with pytest.raises(AssertionError, match="still under way"):
        dispatcher.begin()


def test_begin_may_come_again_before_anything_happened(kind):
    dispatcher = kind(plan_of(4))
    dispatcher.begin()
    dispatcher.begin()
    assert dispatcher.ready(0) == [0]
    assert dispatcher.in_flight == {0}


def test_a_gradient_cannot_become_ready_twice_in_an_iteration(kind):
    dispatcher = kind(plan_of(4, 4))
    dispatcher.begin()
    dispatcher.ready(0)
    with pytest.raises(AssertionError, match="tensor 0 became ready twice"):
        dispatcher.ready(0)


class Watch:
    """Drives a Dispatcher through one iteration in random order and checks each start against the plan."""

    def __init__(
        self, kind: type[Dispatcher | NativeDispatcher], plan: Plan, random: Random, told: list[int] | None = None
    ) -> None:
        self.plan, self.random, self.told = plan, random, told
        self.dispatcher = kind(plan, follow=told is not None)

    def run(self) -> list[int]:
        plan = self.plan
        self.ready: list[int] = []
        self.eligible: list[int] = []  # in the order of eligibility, not yet started
        self.in_flight: list[int] = []
        self.started: list[int] = []
        self.allowed: list[int] = []
        to_tell = list(self.told or [])
        self.dispatcher.begin()
        coming = list(range(len(plan.tensors)))
        self.random.shuffle(coming)
        while coming or to_tell or self.in_flight:
            facts = ["ready"] * bool(coming) + ["done"] * bool(self.in_flight) + ["allow"] * bool(to_tell)
            match self.random.choice(facts):
                case "ready":
                    tensor = coming.pop()
                    self.ready.append(tensor)
                    self.eligible += [
                        index
                        for index, message in enumerate(plan.messages)
                        if tensor in self.needs(message) and self.needs(message) <= set(self.ready)
                    ]
                    starts = self.dispatcher.ready(tensor)
                case "done":
                    done = self.in_flight.pop(self.random.randrange(len(self.in_flight)))
                    starts = self.dispatcher.finished(done)
                case "allow":
                    self.allowed.append(to_tell.pop(0))
                    starts = self.dispatcher.allow(self.allowed[-1])
            for start in starts:
                self.check_start(start)
            for lane in range(len(plan.lanes)):
                self.check_nothing_could_start(lane)
            assert self.dispatcher.blocking() == self.blocking()
            assert self.dispatcher.in_flight == set(self.in_flight)
        assert self.dispatcher.done
        return self.started

    def needs(self, message: Message) -> set[int]:
        return {piece.tensor for piece in message.slices} | ({message.hold_until} - {None})

    def next_of(self, lane: int) -> int | None:
        """What has to start next in a lane: the order's next, if it is eligible, else the most urgent eligible."""
        order = self.allowed if self.told is not None else self.plan.sequence
        if order is not None:
            left = [m for m in order if self.plan.messages[m].lane == lane and m not in self.started]
            return left[0] if left and left[0] in self.eligible else None
        waiting = [m for m in self.eligible if self.plan.messages[m].lane == lane]
        return min(waiting, key=lambda m: (self.plan.messages[m].priority, self.eligible.index(m)), default=None)

    def fits(self, message: int) -> bool:
        lane = self.plan.messages[message].lane
        window = self.plan.lanes[lane].window_bytes
        used = [self.plan.messages[m].size_bytes for m in self.in_flight if self.plan.messages[m].lane == lane]
        return window is None or not used or sum(used) + self.plan.messages[message].size_bytes <= window

    def check_start(self, message: int) -> None:
        assert message == self.next_of(self.plan.messages[message].lane)
        assert self.fits(message)
        self.eligible.remove(message)
        self.in_flight.append(message)
        self.started.append(message)

    def blocking(self) -> list[int]:
        """Of each lane whose next message does not fit, the first of those in flight; they are in the order of starts."""
        full = [
            lane for lane in range(len(self.plan.lanes)) if (head := self.next_of(lane)) is not None and not self.fits(head)
        ]
        return [next(m for m in self.in_flight if self.plan.messages[m].lane == lane) for lane in full]

    def check_nothing_could_start(self, lane: int) -> None:
        message = self.next_of(lane)
        assert message is None or not self.fits(message)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(plan=plans(), random=st.randoms(use_true_random=False))
def test_in_any_history_every_message_starts_once_at_its_turn_and_within_the_window(kind, plan, random):
    watch = Watch(kind, plan, random)
    for _ in range(2):
        assert sorted(watch.run()) == list(range(len(plan.messages)))


@settings(max_examples=50, deadline=None)
@given(plan=plans(sequenced=True), random=st.randoms(use_true_random=False))
def test_in_any_history_a_sequence_is_the_order_of_starts_in_each_lane(kind, plan, random):
    started = Watch(kind, plan, random).run()
    for lane in range(len(plan.lanes)):
        expected = [message for message in plan.sequence if plan.messages[message].lane == lane]
        assert [message for message in started if plan.messages[message].lane == lane] == expected


@settings(max_examples=50, deadline=None)
@given(plan=plans(), random=st.randoms(use_true_random=False), data=st.data())
def test_in_any_history_a_follower_starts_in_the_order_told(kind, plan, random, data):
    told = data.draw(st.permutations(range(len(plan.messages))))
    started = Watch(kind, plan, random, told).run()
    for lane in range(len(plan.lanes)):
        expected = [message for message in told if plan.messages[message].lane == lane]
        assert [message for message in started if plan.messages[message].lane == lane] == expected


def test_second_halves_start_when_all_messages_are_reduced_the_most_urgent_first_in_the_window(kind):
    specs = tuple(TensorSpec(name, 4) for name in "abc")
    messages = tuple(Message((Slice(index, 0, 4),), priority=2 - index, two_phase=index > 0) for index in range(3))
    for sequence in (None, (0, 1, 2)):
        dispatcher = kind(Plan("test", "test", specs, messages, (Lane(window_bytes=4),), sequence=sequence))
        for _ in range(2):
            dispatcher.begin()
            assert [dispatcher.ready(tensor) for tensor in range(3)] == [[0], [], []]
            assert dispatcher.blocking() == [0]
            assert dispatcher.finished(0) in ([1], [2])
            (first,) = dispatcher.in_flight
            assert dispatcher.blocking() == [first]
            assert not dispatcher.in_second_phase(first)
            (second,) = dispatcher.finished(first)
            assert not dispatcher.done
            # both are reduced: the second halves go by priority
            assert dispatcher.blocking() == []  # no second half may start yet
            assert dispatcher.finished(second) == [2]
            assert dispatcher.in_second_phase(2)
            assert dispatcher.blocking() == [2]
            assert dispatcher.finished(2) == [1]
            assert dispatcher.blocking() == []
            assert not dispatcher.done
            assert dispatcher.finished(1) == []
            assert dispatcher.done


@settings(deadline=None)
@given(st.data())
def test_a_message_that_may_start_waits_for_each_other_message_once_at_most(kind, data):
    """Strict priority starves nothing: an iteration's messages are finite, and the next begins after all of them."""
    sizes = [4 * size for size in data.draw(st.lists(st.integers(1, 10), min_size=2, max_size=12))]
    priorities = data.draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    dispatcher = kind(plan_of(*sizes, priorities=priorities, window=data.draw(st.integers(1, 60))))
    for _ in range(2):
        dispatcher.begin()
        unready, started, passed = list(range(len(sizes))), [], {}
        while unready or dispatcher.in_flight:
            if unready and data.draw(st.booleans() if dispatcher.in_flight else st.just(True)):
                tensor = unready.pop(data.draw(st.integers(0, len(unready) - 1)))
                passed[tensor] = len(started)
                started += dispatcher.ready(tensor)
            else:
                started += dispatcher.finished(data.draw(st.sampled_from(sorted(dispatcher.in_flight))))
        assert sorted(started) == list(range(len(sizes)))  # whatever was more urgent, nothing is left
        assert all(started.index(message) - before < len(sizes) for message, before in passed.items())
        assert dispatcher.done
