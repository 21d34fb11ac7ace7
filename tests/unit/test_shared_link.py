"""What messages under way together take, against closed forms and the turns written out."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradlane import policies
from gradlane.core.cluster import Link, RateStep
from gradlane.core.network import CostSegment, Network, Sharing
from gradlane.errors import InputError
from gradlane.sim import iteration_ns
from gradlane.sim.shared_link import SharedLink
from gradlane.testing.generators import networks, profiles

# a byte a nanosecond; of a startup of 100 are 60 latency and 40 handling
TWO_AT_ONCE = Network(2, (CostSegment(100, 10**9, latency_ns=60),), sharing=Sharing(max_in_flight=2))


def ends(turns, sizes, starts=None, classes=None, lanes=None):
    """When each message ends."""
    found = {}
    left = sorted(zip(starts or [0] * len(sizes), range(len(sizes)), strict=True))
    while left or len(found) < len(sizes):
        now = turns.next_ns()
        if left and left[0][0] <= now:
            start, message = left.pop(0)
            turns.add(start, message, sizes[message], classes[message] if classes else 0, lane=lanes[message] if lanes else 0)
        else:
            ended = turns.run()
            if ended is not None:
                found[ended] = now
    return [found[message] for message in range(len(sizes))]


def test_a_message_alone_takes_what_the_network_says_however_many_turns_it_has():
    for turns in (1, 3, 7):
        network = msgspec.structs.replace(TWO_AT_ONCE, sharing=Sharing(2, turns, 1_000))
        assert ends(SharedLink(network), [12_345]) == [network.cost_ns(12_345)] == [12_445]


def test_to_tell_of_an_end_takes_the_processor_and_keeps_what_is_told_in_flight():
    # the first has passed at 110; the second, whose turn is before, is handled until 140; then the first is told of, for 200;
    # the third is in flight from 150, when the second ends, and is handled from 340
    link = SharedLink(TWO_AT_ONCE, telling_ns=lambda message: 200 if message == 0 else 0)
    assert ends(link, [10, 10, 10]) == [340, 150, 390]


def test_latency_and_handling_of_the_second_message_pass_behind_the_first():
    # 60 + 40 + 1000, then the other's 1000; it was handled meanwhile
    assert ends(SharedLink(TWO_AT_ONCE), [1_000, 1_000]) == [1_100, 2_100]


def test_a_third_message_begins_when_one_of_two_has_ended():
    # its latency passes from 1100 on behind the second one, and then it is handled
    assert ends(SharedLink(TWO_AT_ONCE), [1_000, 1_000, 1_000]) == [1_100, 2_100, 3_100]
    # small ones: two at once, each 60 of latency, then 40 of one of them at a time, the third from 101 on
    assert ends(SharedLink(TWO_AT_ONCE), [1, 1, 1]) == [101, 141, 202]


def test_a_small_message_is_handled_while_a_large_one_s_bytes_pass():
    network = Network(2, (CostSegment(0, 10**9),), sharing=Sharing(max_in_flight=2), min_message_ns=500)
    # the large one has the link from 0 on; the small one's ten bytes come after
    assert ends(SharedLink(network), [5_000, 10]) == [5_000, 5_010]
    # more of them, in another lane and more urgent, are handled one after another, and hold it up by their bytes alone
    assert ends(SharedLink(network), [5_000, 10, 10], classes=[1, 0, 0], lanes=[0, 1, 1]) == [5_020, 500, 990]


@settings(max_examples=100, deadline=None)
@given(
    startup_ns=st.integers(0, 1_000),
    min_message_ns=st.integers(0, 3_000),
    messages=st.lists(st.tuples(st.integers(1, 5_000), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=8),
)
@example(100, 0, [(1_000, 0, 0), (1_000, 0, 1)])
def test_where_messages_do_not_overlap_those_of_other_lanes_are_no_exception(startup_ns, min_message_ns, messages):
    network = Network(2, (CostSegment(startup_ns, 10**9),), min_message_ns=min_message_ns)
    sizes, classes, lanes = map(list, zip(*messages, strict=True))
    assert max(ends(SharedLink(network), sizes, classes=classes, lanes=lanes)) == sum(map(network.cost_ns, sizes))


def test_two_messages_of_two_turns_alternate_as_gloo_s_do_among_two_ranks():
    network = Network(2, (CostSegment(0, 10**9),), sharing=Sharing(max_in_flight=2, chunks=2))
    # a b a b: the first ends after three quarters of the time of both, as `python -m bench.shared_link` measures
    assert ends(SharedLink(network), [4_000, 4_000]) == [6_000, 8_000]
    # a small one behind a large one waits for half of it, then for the other half
    assert ends(SharedLink(network), [4_000, 10]) == [4_005, 4_010]


def test_a_message_larger_than_its_turns_lets_a_small_one_pass_sooner():
    network = Network(2, (CostSegment(0, 10**9),), sharing=Sharing(max_in_flight=2, chunks=2, chunk_bytes=1_000))
    # eight turns of 500 in place of two of 2000
    assert ends(SharedLink(network), [4_000, 10]) == [4_010, 1_010]


def test_what_is_more_urgent_takes_the_link_and_what_it_interrupts_goes_on():
    network = Network(2, (CostSegment(0, 10**9),), sharing=Sharing(max_in_flight=2))
    assert ends(SharedLink(network), [1_000, 1_000, 50], [0, 0, 300], [1, 1, 0]) == [1_050, 2_050, 350]


def test_the_processor_too_serves_what_is_more_urgent_and_what_it_interrupts_goes_on():
    # at 60 the first is handled; at 70 the other's latency has passed, and it is handled until 110; 30 of the first are left
    assert ends(SharedLink(TWO_AT_ONCE), [1, 1], starts=[0, 10], classes=[1, 0], lanes=[0, 1]) == [141, 111]
    assert ends(SharedLink(TWO_AT_ONCE), [1, 1], starts=[0, 10], classes=[0, 0], lanes=[0, 1]) == [101, 141]


@settings(max_examples=100, deadline=None)
@given(
    parts=st.tuples(st.integers(0, 15), st.integers(0, 15)),
    messages=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2), st.integers(1, 25)), min_size=1, max_size=7),
    at_once=st.integers(2, 3),
)
def test_messages_of_several_classes_take_what_the_page_of_the_cost_model_says(parts, messages, at_once):
    latency, overhead = parts
    network = Network(2, (CostSegment(latency + overhead, 10**9, latency_ns=latency),), sharing=Sharing(at_once))
    starts, classes, sizes = (list(column) for column in zip(*sorted(messages), strict=True))
    found = ends(SharedLink(network), sizes, starts, classes, lanes=classes)
    assert found == by_the_page(latency, overhead, starts, classes, sizes, at_once)


def by_the_page(latency, overhead, starts, classes, sizes, at_once):
    """ "Messages that share a network" of docs/cost-model.md, nanosecond by nanosecond; each lane is a class."""
    left = [[latency, overhead, size] for size in sizes]
    came = [None] * len(sizes)  # when it came to the processor or the link for which it waits
    found = [None] * len(sizes)
    for now in itertools.count():
        under_way: list[int] = []
        for lane in set(classes):
            waiting = [m for m in range(len(sizes)) if classes[m] == lane and starts[m] <= now and found[m] is None]
            under_way += waiting[:at_once]
        stage_of = {m: next(stage for stage in range(3) if left[m][stage]) for m in under_way}
        for message, stage in stage_of.items():
            if came[message] is None or came[message][0] != stage:
                came[message] = stage, now
        served = {message for message in under_way if stage_of[message] == 0}
        for stage in (1, 2):
            rivals = sorted((classes[each], came[each], each) for each in under_way if stage_of[each] == stage)
            served |= {each for _, _, each in rivals[:1]}
        for message in served:
            left[message][stage_of[message]] -= 1
            if not any(left[message]):
                found[message] = now + 1
        if None not in found:
            return found
    raise AssertionError


def test_bytes_follow_a_rate_that_changes_and_latency_does_not():
    halved = Link(10**9, (RateStep(0, 5 * 10**8),))
    assert ends(SharedLink(TWO_AT_ONCE, halved), [1_000, 1_000]) == [60 + 40 + 2_000, 60 + 40 + 2 * 2_000]


@settings(max_examples=200, deadline=None)
@given(
    startup_ns=st.integers(0, 10**6),
    latency=st.floats(0, 1),
    at_once=st.integers(1, 2),
    turns=st.integers(1, 6),
    size_bytes=st.integers(1, 10**6),
    pairs=st.integers(1, 6),
)
def test_a_stream_takes_what_the_closed_form_says(startup_ns, latency, at_once, turns, size_bytes, pairs):
    piece = CostSegment(startup_ns, 10**9, latency_ns=int(startup_ns * latency))
    network = Network(2, (piece,), sharing=Sharing(at_once, turns))
    last = max(ends(SharedLink(network), [size_bytes] * 2 * pairs))
    # each turn is cut to whole nanoseconds
    assert last == pytest.approx(network.stream_ns(size_bytes, 2 * pairs), abs=2 * turns * pairs + 1)


@settings(max_examples=60, deadline=None)
@given(profile=profiles(max_tensors=12), network=networks(), name=st.sampled_from(("sync-easgd", "wfbp")))
def test_latency_changes_nothing_where_one_message_is_under_way(profile, network, name):
    alone = msgspec.structs.replace(network, sharing=Sharing())
    without = tuple(msgspec.structs.replace(piece, latency_ns=0) for piece in network.segments)
    plan = policies.get(name).plan(profile, network)
    assert iteration_ns(plan, profile, alone) == iteration_ns(plan, profile, msgspec.structs.replace(alone, segments=without))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(profile=profiles(max_tensors=12), network=networks())
def test_policies_that_plan_by_the_papers_startup_do_not_see_latency(profile, network):
    without = tuple(msgspec.structs.replace(piece, latency_ns=0) for piece in network.segments)
    old = Network(network.workers, without, min_message_ns=network.min_message_ns)
    for name in ("mg-wfbp", "mg-wfbp-exact", "blocks"):
        assert policies.get(name).plan(profile, network) == policies.get(name).plan(profile, old)


def test_a_lane_has_as_many_under_way_as_another_whatever_that_has():
    assert ends(SharedLink(TWO_AT_ONCE), [1, 1, 1]) == [101, 141, 202]
    # the third begins at once, and is handled from 140 on, behind the second one
    assert ends(SharedLink(TWO_AT_ONCE), [1, 1, 1], lanes=[0, 0, 1]) == [101, 141, 181]


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=6), chunks=st.integers(1, 6))
def test_lanes_share_the_link_evenly(sizes, chunks):
    network = Network(2, (CostSegment(0, 10**9),), sharing=Sharing(max_in_flight=2, chunks=chunks))
    # while a message is on its way, each other one has passed as many bytes, or all that it has
    expected = [sum(min(other, size) for other in sizes) for size in sizes]
    found = ends(SharedLink(network), sizes, lanes=list(range(len(sizes))))
    assert found == pytest.approx(expected, abs=2 * chunks * len(sizes) ** 2)


def test_a_lane_s_share_is_the_others_once_it_is_empty_and_a_more_urgent_class_takes_all():
    network = Network(2, (CostSegment(0, 10**9),), sharing=Sharing(max_in_flight=2))
    assert ends(SharedLink(network), [1_000, 100], lanes=[0, 1]) == [1_100, 200]
    # two of a class share what an urgent one leaves from 150 on
    assert ends(SharedLink(network), [1_000, 100, 50], [0, 0, 100], [1, 1, 0], [0, 1, 2]) == [1_150, 250, 150]
    halved = Link(10**9, (RateStep(0, 5 * 10**8),))
    assert ends(SharedLink(network, halved), [1_000, 100], lanes=[0, 1]) == [2_200, 400]


def test_ends_in_two_lanes_are_told_of_one_after_the_other():
    link = SharedLink(msgspec.structs.replace(TWO_AT_ONCE, segments=(CostSegment(100, 10**12),)), telling_ns=lambda message: 50)
    # they are handled until 100 and 200, and have passed at 101 and 201
    assert ends(link, [1, 1], lanes=[0, 1]) == [250, 300]


@settings(max_examples=60, deadline=None)
@given(network=networks(), size_bytes=st.integers(1, 10**8))
@example(
    Network(
        2, (CostSegment(500, 10**9),), sharing=Sharing(max_in_flight=2), min_message_ns=3_000, min_message_latency_ns=1_500
    ),
    2_500,
)
def test_no_message_occupies_the_network_for_less_than_the_bounds_take_it_to(network, size_bytes):
    latency_ns, handling_ns, bytes_ns = network.parts_ns(size_bytes)
    assert latency_ns + handling_ns + bytes_ns == network.cost_ns(size_bytes)
    assert handling_ns >= network.occupied_ns(network.segment_of(size_bytes))


def test_latency_is_a_part_of_the_startup():
    with pytest.raises(InputError, match="latency_ns: got 101"):
        CostSegment(100, 10**9, latency_ns=101)


def test_no_message_takes_less_than_the_least_cost_and_what_costs_more_takes_no_longer():
    network = Network(2, (CostSegment(0, 10**9),), sharing=Sharing(max_in_flight=2), min_message_ns=500)
    assert ends(SharedLink(network), [10]) == [network.cost_ns(10)] == [500]
    # the third is not handled and has the link from 500 on; the second, handled until 970, waits for it
    assert ends(SharedLink(network), [10, 20, 2_000]) == [500, 2_520, 2_500]
    # what handling hides passes behind the other's, and less of it where bytes take longer
    hiding = msgspec.structs.replace(network, min_message_latency_ns=200)
    assert ends(SharedLink(hiding), [10]) == [500]
    assert ends(SharedLink(hiding), [10, 20]) == [500, 790]
    assert hiding.parts_ns(600) == (0, 0, 600)
    assert [hiding.parts_ns(size) for size in (10, 450)] == [(200, 290, 10), (50, 0, 450)]
    # a link at half its rate doubles what bytes take, not what handling does
    halved = Link(10**9, (RateStep(0, 5 * 10**8),))
    assert ends(SharedLink(network, halved), [100]) == [400 + 200]
    assert ends(SharedLink(network, halved), [2_000, 100]) == [4_000, 4_200]
