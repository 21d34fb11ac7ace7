from __future__ import annotations

import msgspec
import pytest

from gradlane.core.checks import check_plan, check_timeline
from gradlane.core.network import Network
from gradlane.core.plan import Lane, Message, Plan, Slice
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.core.timeline import Span, Timeline
from gradlane.errors import PlanError
from gradlane.sim import simulate

# -- check_plan -------------------------------------------------------------------------------------------

SPECS = (TensorSpec("a", 8), TensorSpec("b", 12), TensorSpec("c", 4, "float16"))


def plan_moving(*messages: list[tuple[int, int, int]], tensors: tuple[TensorSpec, ...] = SPECS) -> Plan:
    return Plan("test", "test", tensors, tuple(Message(tuple(Slice(*piece) for piece in pieces)) for pieces in messages))


def test_a_plan_that_moves_each_byte_once_passes():
    check_plan(plan_moving([(0, 0, 8), (1, 4, 8)], [(2, 0, 4)], [(1, 0, 4)]), SPECS)


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([[(0, 0, 8)], [(1, 0, 12)]], r"c: moves 0 bytes, expected 4"),
        ([[(0, 0, 4)], [(1, 0, 12)], [(2, 0, 4)]], r"a: moves 4 bytes, expected 8"),
        ([[(0, 4, 4)], [(1, 0, 12)], [(2, 0, 4)]], r"a: got bytes from 0 never moved"),
        ([[(0, 0, 8)], [(1, 0, 4), (1, 8, 4)], [(2, 0, 4)]], r"b: got bytes from 4 never moved"),
        ([[(0, 0, 8)], [(1, 0, 8), (1, 4, 8)], [(2, 0, 4)]], r"b: got bytes from 4 moved twice"),
        ([[(0, 0, 8)], [(0, 0, 8)], [(1, 0, 12)], [(2, 0, 4)]], r"a: got bytes from 0 moved twice"),
        ([[(0, 0, 16)], [(1, 0, 12)], [(2, 0, 4)]], r"a: moves 16 bytes, expected 8"),
        ([[(0, 0, 8)], [(1, 0, 6), (1, 6, 6)], [(2, 0, 4)]], r"messages\[1\]: b is cut inside an element of float32"),
        ([[(0, 0, 8)], [(1, 0, 12)], [(2, 0, 3), (2, 3, 1)]], r"messages\[2\]: c is cut inside an element of float16"),
        ([[(0, 0, 8)], [(1, 0, 12), (2, 0, 4)]], r"messages\[1\]: mixes float16 and float32"),
        ([[(0, 0, 8)], [(1, 0, 12)], [(2, 0, 4)], [(3, 0, 4)]], r"messages\[3\]: got tensor 3, expected below 3"),
    ],
)
def test_a_plan_that_does_not_is_refused_with_the_first_fault(messages, fault):
    with pytest.raises(PlanError, match=fault):
        check_plan(plan_moving(*messages), SPECS)


@pytest.mark.parametrize(
    ("model", "difference"),
    [
        ((TensorSpec("a", 8), TensorSpec("d", 12)), r"tensor 1 is b \(12 B, float32\) in the plan and d \(12 B, float32\)"),
        ((TensorSpec("a", 16), TensorSpec("b", 12)), r"tensor 0 is a \(8 B, float32\) in the plan and a \(16 B, float32\)"),
        ((TensorSpec("a", 8, "float16"), TensorSpec("b", 12)), r"tensor 0 is a \(8 B, float32\) .* a \(8 B, float16\)"),
        ((TensorSpec("a", 8), TensorSpec("b", 12), TensorSpec("c", 4)), r"it has 2 tensors, the model 3"),
    ],
)
def test_a_plan_for_another_model_is_refused_with_the_first_difference(model, difference):
    plan = plan_moving([(0, 0, 8), (1, 0, 12)], tensors=SPECS[:2])
    with pytest.raises(PlanError, match=f"for another model: {difference}"):
        check_plan(plan, model)


# -- check_timeline ---------------------------------------------------------------------------------------

# three tensors of one layer each; message 0 is held for tensor 1, the window takes two messages
PROFILE = Profile(
    "three",
    "none",
    tuple(TensorProfile(TensorSpec(f"t{index}", 8), 10 * (index + 1), 2 - index) for index in range(3)),
    tuple(Layer(f"l{index}", 5, 1) for index in range(3)),
    30,
)
PLAN = Plan(
    "test",
    "three",
    PROFILE.specs,
    (Message((Slice(0, 0, 8),), hold_until=1), Message((Slice(1, 0, 8),)), Message((Slice(2, 0, 8),))),
    (Lane(window_bytes=16),),
    crosses_barrier=True,
    sequence=(0, 1, 2),
)
TIMELINE = simulate(PLAN, PROFILE, Network.line(2, 0, 10**9), iterations=2)


def changed(kind: str, iteration: int, subject: int, **times: int) -> Timeline:
    """TIMELINE with new times for one span."""
    spans = [
        msgspec.structs.replace(span, **times)
        if (span.kind, span.iteration, span.subject) == (kind, iteration, subject)
        else span
        for span in TIMELINE.spans
    ]
    assert spans != list(TIMELINE.spans)
    return Timeline(TIMELINE.plan, 0, tuple(sorted(spans, key=lambda span: span.start_ns)))


def without(kind: str, iteration: int, subject: int) -> Timeline:
    spans = tuple(span for span in TIMELINE.spans if (span.kind, span.iteration, span.subject) != (kind, iteration, subject))
    assert len(spans) == len(TIMELINE.spans) - 1
    return Timeline(TIMELINE.plan, 0, spans)


def with_more(*spans: Span) -> Timeline:
    return Timeline(TIMELINE.plan, 0, tuple(sorted((*TIMELINE.spans, *spans), key=lambda span: span.start_ns)))


def test_the_timeline_that_the_faults_below_are_put_into_is_sound():
    check_timeline(TIMELINE, PLAN)
    assert [(s.iteration, s.subject, s.start_ns, s.end_ns) for s in TIMELINE.of("send")] == [
        (0, 0, 35, 43),
        (0, 1, 35, 51),
        (0, 2, 45, 59),
        (1, 0, 97, 105),
        (1, 1, 97, 113),
        (1, 2, 107, 121),
    ]


@pytest.mark.parametrize(
    ("timeline", "fault"),
    [
        (Timeline("0123456789abcdef", 0, TIMELINE.spans), "timeline of plan 0123456789abcdef, checked against"),
        (with_more(Span("send", 0, 3, 50, 60)), "iteration 0: send 3 at 50 is none of the plan's 3 messages"),
        (with_more(Span("send", 0, -1, 50, 60)), "iteration 0: send -1 at 50 is none of the plan's 3 messages"),
        (without("ready", 0, 2), "iteration 0: send 2 at 45 starts and tensor 2 never is ready"),
        (changed("ready", 0, 2, start_ns=46, end_ns=46), "iteration 0: send 2 at 45 starts before tensor 2 is ready"),
        (changed("send", 0, 2, start_ns=44), "iteration 0: send 2 at 44 starts before tensor 2 is ready"),
        (changed("send", 0, 0, start_ns=34), "iteration 0: send 0 at 34 starts before tensor 1 is ready"),
        (with_more(Span("send", 1, 2, 130, 140)), "iteration 1: message 2 was sent 2 times"),
        (without("send", 1, 2), "iteration 1: message 2 was sent 0 times"),
        (changed("send", 0, 0, end_ns=46), "lane 0: 24 bytes in 3 messages unfinished, window 16"),
        (changed("send", 0, 0, start_ns=36), "iteration 0: send 0 at 36 starts after message 1, against the sequence"),
        (with_more(Span("update", 7, 0, 200, 201)), "iteration 7: update 0 at 200 begins and its bytes never arrive"),
        (changed("update", 0, 2, start_ns=58), "iteration 0: update 2 at 58 begins before its bytes arrived"),
        (changed("update", 0, 2, end_ns=61), "iteration 1: use 2 at 60 reads a parameter before its update ended"),
    ],
)
def test_a_fault_in_a_timeline_is_found_and_named(timeline, fault):
    with pytest.raises(AssertionError, match=f"^{fault}"):
        check_timeline(timeline, PLAN)


def test_a_lone_message_may_exceed_the_window_and_a_second_beside_it_may_not():
    plan = msgspec.structs.replace(PLAN, lanes=(Lane(window_bytes=4),))
    alone = simulate(plan, PROFILE, Network.line(2, 0, 10**9), iterations=1)
    check_timeline(alone, plan)
    beside = Timeline(plan.fingerprint, 0, TIMELINE.spans)
    with pytest.raises(AssertionError, match="lane 0: 16 bytes in 2 messages unfinished, window 4"):
        check_timeline(beside, plan)


def test_a_sequence_binds_each_lane_by_itself():
    lanes = (Lane(), Lane())
    messages = tuple(msgspec.structs.replace(message, lane=index % 2) for index, message in enumerate(PLAN.messages))
    plan = msgspec.structs.replace(PLAN, lanes=lanes, messages=messages, sequence=(1, 0, 2))
    # message 0 starts before message 1 does, which is the other lane's business
    check_timeline(Timeline(plan.fingerprint, 0, TIMELINE.spans), plan)


# -- halves -----------------------------------------------------------------------------------------------

HALVES = (Span("ready", 0, 0, 0, 0), Span("send", 0, 0, 0, 5))


def halved(*spans: Span) -> tuple[Timeline, Plan]:
    plan = plan_moving([(0, 0, 8)], tensors=SPECS[:1])
    return Timeline(plan.fingerprint, 0, (*HALVES, *spans)), plan


def test_what_was_sent_has_arrived_when_it_was_received():
    check_timeline(*halved(Span("receive", 0, 0, 5, 9), Span("update", 0, 0, 9, 10)))


@pytest.mark.parametrize(
    ("spans", "fault"),
    [
        ((Span("receive", 0, 0, 5, 9), Span("update", 0, 0, 8, 10)), "update 0 at 8 begins before its bytes arrived"),
        ((Span("receive", 0, 0, 2, 4),), "receive 0 at 2 ends before the message was sent"),
        ((Span("receive", 0, 0, 5, 9), Span("receive", 0, 0, 5, 9)), "received twice or never"),
        ((Span("receive", 1, 0, 5, 9),), "send 0 at 0 is never received"),
    ],
)
def test_a_half_that_is_out_of_place_is_found(spans, fault):
    timeline, plan = halved(*spans)
    with pytest.raises(AssertionError, match=fault):
        check_timeline(timeline, plan)
