"""Mercury, Geryon, DeAR and Prophet: their plans, and what they come to."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane import policies, zoo
from gradlane.core.backends import why_not
from gradlane.core.cluster import Cluster
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.stepwise import stepwise
from gradlane.core.timeline import Span
from gradlane.errors import InputError
from gradlane.planning.plans import make_plan, took_ns
from gradlane.policies.bytescheduler import ByteScheduler
from gradlane.policies.geryon import Geryon
from gradlane.policies.p3 import P3
from gradlane.policies.prophet import Prophet
from gradlane.sim import iteration_ns, simulate, simulate_servers
from gradlane.testing.generators import LAYERS, chain, networks, profiles
from gradlane.testing.oracles import mercury_optimum

BYTE_A_NS = Network.line(2, startup_ns=0, bytes_per_second=10**9)


@settings(max_examples=60, deadline=None)
@given(layers=LAYERS, name=st.sampled_from(policies.names("all-reduce")))
def test_no_schedule_beats_mercury_where_packets_are_small_and_free(layers, name):
    # Theorem 1 of Mercury and of ByteScheduler
    profile = chain(*layers)
    assert mercury_optimum(layers) <= iteration_ns(policies.get(name).plan(profile, BYTE_A_NS), profile, BYTE_A_NS)


@settings(max_examples=60, deadline=None)
@given(layers=LAYERS)
def test_slices_of_an_element_under_priority_are_mercury(layers):
    # Theorem 1 of ByteScheduler: the smaller the partition the nearer; at one element, four nanoseconds
    profile = chain(*layers)
    ideal = mercury_optimum(layers)
    sliced = iteration_ns(policies.get("p3", slice_bytes=8).plan(profile, BYTE_A_NS), profile, BYTE_A_NS)
    assert ideal <= sliced <= ideal + 8


@settings(max_examples=100, deadline=None)
@given(layers=LAYERS, theta=st.integers(0, 50), elements=st.integers(2, 12))
def test_slices_are_delayed_by_no_more_than_the_paper_says(layers, theta, elements):
    # ByteScheduler §4.1 for all-reduce: sum of floor(size / delta) theta, and delta / bandwidth; sizes are multiples
    delta = 4 * elements
    layers = [(backward, -(-size // delta) * delta, update, forward) for backward, size, update, forward in layers]
    profile, ideal = chain(*layers), mercury_optimum(layers)
    network = Network.line(2, theta, 10**9)
    plan = policies.get("bytescheduler", partition_bytes=delta, credit_bytes=delta).plan(profile, network)
    slices = sum(tensor.spec.size_bytes // delta for tensor in profile.tensors)
    assert iteration_ns(plan, profile, network) <= ideal + slices * theta + delta


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(profile=profiles(), startup=st.sampled_from([0, 30_000]))
def test_mercury_without_preemption_pushes_as_wfbp_does(profile, startup):
    cluster = Cluster.homogeneous(3, 3, 10**9, startup_ns=startup)
    ends = []
    for name in ("mercury-no-preemption", "wfbp"):
        plan = make_plan(policies.get(name), profile, Place.of(cluster))
        (timeline,) = simulate_servers(plan, profile, cluster, 1)
        ends.append({span.subject: span.end_ns for span in timeline.of("send")})
    assert ends[0] == ends[1]


def test_of_a_thousand_tensors_each_has_a_priority_of_its_own_under_mercury():
    profile = chain(*[(1, 8, 0, 1)] * 1000)
    plan = policies.get("mercury").plan(profile, BYTE_A_NS)
    assert [message.priority for message in plan.messages] == list(range(999, -1, -1))


# -- Geryon -----------------------------------------------------------------------------------------------


def test_geryon_puts_the_layers_above_the_threshold_in_the_urgent_lane():
    profile = chain(*[(1, 8, 0, 0)] * 4)
    # urgencies of layers 1 to 4: 0.75, 0.5, 0.25, 0; tensors stand the other way round
    for threshold, lanes in ((0, [1, 0, 0, 0]), (25, [1, 1, 0, 0]), (50, [1, 1, 1, 0]), (100, [1, 1, 1, 1])):
        plan = Geryon(threshold).plan(profile, BYTE_A_NS)
        assert [message.lane for message in plan.messages] == lanes
    assert [lane.network_priority for lane in plan.lanes] == [0, 1]


def test_geryon_finds_the_threshold_that_is_fastest_where_it_is_simulated():
    profile = zoo.profile("alexnet", device="k40", batch=64)
    cluster = Cluster.homogeneous(8, 8, 1_250_000_000, colocated=True, startup_ns=300_000, network_classes=2)
    place = Place.of(cluster)
    found = make_plan(Geryon(threshold="auto"), profile, place, cluster)
    of_each = [make_plan(Geryon(percent), profile, place) for percent in (50, 10, 30, 70, 90)]
    times = [took_ns(plan, profile, cluster) for plan in of_each]
    assert found == of_each[times.index(min(times))]
    assert min(times) < max(times)


def test_without_classes_in_the_network_a_threshold_that_is_found_is_the_one_that_was_given():
    profile = chain(*[(1, 8, 0, 0)] * 4)
    network = msgspec.structs.replace(BYTE_A_NS, workers=2)
    slow = msgspec.structs.replace(profile, backward_ns=10**6)  # nothing that is sent is waited for
    place = Place(network)
    assert make_plan(Geryon(75, threshold="auto"), slow, place) == make_plan(Geryon(75), slow, place)


def test_a_threshold_is_not_found_for_coarse_categories():
    with pytest.raises(InputError, match="categories: got 'coarse'"):
        Geryon(categories="coarse", threshold="auto")


def test_p3_with_a_blocking_call_starts_the_next_slice_while_the_last_fits_the_sockets_buffer():
    profile = chain((0, 100, 0, 0), (0, 100, 0, 0))
    lanes = [policies.get("p3", slice_bytes=50, buffer_bytes=size).plan(profile, BYTE_A_NS).lanes[0] for size in (0, 50)]
    assert [lane.window_bytes for lane in lanes] == [50, 100]


def test_coarse_categories_make_urgent_what_takes_more_of_the_time_than_of_the_bytes():
    # as AlexNet: convolutions with 6 % of the bytes and most of the forward pass, fully connected layers the other way round
    profile = chain((0, 16, 0, 400), (0, 44, 0, 500), (0, 604, 0, 70), (0, 336, 0, 30))
    plan = Geryon(categories="coarse").plan(profile, BYTE_A_NS)
    assert [message.lane for message in plan.messages] == [1, 1, 0, 0]


def test_more_lanes_share_what_is_not_urgent_evenly_by_bytes_in_the_order_of_the_forward_pass():
    profile = chain((0, 8, 0, 0), (0, 8, 0, 0), (0, 8, 0, 0), (0, 16, 0, 0), (0, 16, 0, 0))
    plan = Geryon(75, lanes=4).plan(profile, BYTE_A_NS)
    assert [message.lane for message in plan.messages] == [3, 2, 1, 1, 0]
    assert [lane.network_priority for lane in plan.lanes] == [0, 1, 2, 3]


def test_an_urgent_lane_interrupts_the_other_and_that_one_goes_on_where_it_stopped():
    profile = chain((10, 20, 0, 0), (0, 100, 0, 0))
    sends = simulate(Geryon(25).plan(profile, BYTE_A_NS), profile, BYTE_A_NS, 1).of("send")
    assert [(send.subject, send.start_ns, send.end_ns) for send in sends] == [(0, 0, 120), (1, 10, 30)]


def test_shards_are_equal_parts_of_large_tensors_and_slices_are_counted_in_elements():
    profile = chain((0, 4 * 8192, 0, 0), (0, 4 * 4095, 0, 0))
    plan = Geryon(slice_elements=1000, shards=4).plan(profile, BYTE_A_NS)
    sizes = [(piece.tensor, piece.size_bytes // 4) for message in plan.messages for piece in message.slices]
    whole = [(0, 1000)] * 4 + [(0, 95)]
    of_shard = [(1, 1000), (1, 1000), (1, 48)]
    assert sizes == whole + of_shard * 4


# -- DeAR -------------------------------------------------------------------------------------------------


def test_dear_reduces_in_backward_and_gathers_in_forward_order():
    profile = chain((30, 40, 1, 10), (20, 20, 2, 10))
    network = Network.line(2, startup_ns=4, bytes_per_second=10**9)
    plan = policies.get("dear", fusion_bytes=1).plan(profile, network)
    assert [message.two_phase for message in plan.messages] == [True, True]
    timeline = simulate(plan, profile, network, 1)
    # backward from 20 to 70: halves of 24 and 44; both reduced by 92, then layer 1's first
    assert [s for s in timeline.spans if s.kind in ("send", "receive")] == [
        Span("send", 0, 0, 40, 52),
        Span("send", 0, 1, 70, 92),
        Span("receive", 0, 1, 92, 114),
        Span("receive", 0, 0, 92, 126),
    ]
    # layer 1 runs from 115 to 125, layer 2's gather ends at 126
    assert iteration_ns(plan, profile, network) == 126 - 20 + 2 + 10


def test_dear_fuses_neighbours_up_to_its_size():
    profile = chain(*[(1, 8, 0, 0)] * 5)
    plan = policies.get("dear", fusion_bytes=17).plan(profile, BYTE_A_NS)
    assert [message.tensors for message in plan.messages] == [(0, 1), (2, 3), (4,)]
    assert [message.priority for message in plan.messages] == [3, 1, 0]


# -- Prophet ----------------------------------------------------------------------------------------------


def blocks(plan: Plan) -> list[tuple[list[tuple[int, int, int]], int | None]]:
    return [([(s.tensor, s.offset_bytes, s.size_bytes) for s in m.slices], m.hold_until) for m in plan.messages]


def test_geryon_pulls_after_the_last_push_in_the_order_of_use_or_drawn():
    profile = zoo.profile("alexnet")
    late = [Geryon(pulls="after pushes", pull_seed=seed).plan(profile, Network.line(2, 0, 10**9)) for seed in (0, 1, 2)]
    at_once = Geryon().plan(profile, Network.line(2, 0, 10**9))
    urgency = profile.urgency()
    for plan in late:
        assert [message.slices for message in plan.messages] == [message.slices for message in at_once.messages]
        assert sorted(plan.second_phases) == list(range(len(plan.messages)))
    by_use = [urgency[late[0].messages[index].slices[0].tensor] for index in late[0].second_phases]
    assert by_use == sorted(by_use)
    assert len({plan.second_phases for plan in late}) == 3
    with pytest.raises(InputError, match="pull_seed: got 1"):
        Geryon(pull_seed=1)


def test_prophet_plans_for_a_workers_own_link_and_pulls_each_gradient_after_its_push():
    profile = zoo.profile("resnet50", device="m60", batch=64)
    one_server, as_many = Cluster.homogeneous(3, 1, 125_000_000), Cluster.homogeneous(3, 3, 125_000_000)
    own, shared = (make_plan(Prophet(), profile, Place.of(where)) for where in (one_server, as_many))
    assert own == shared  # the link of a worker is the same
    assert own.wire == "packet-fifo"
    assert make_plan(Prophet(), profile, Place(Network.line(3, 0, 10**9))).wire == "fifo"


def test_servers_return_the_most_urgent_sum_of_bytescheduler_first_unless_told_otherwise():
    profile = zoo.profile("resnet50", device="m60", batch=64)
    over_servers = Place.of(Cluster.homogeneous(3, 1, 125_000_000))
    assert make_plan(ByteScheduler(), profile, over_servers).wire == "pull-priority"
    assert make_plan(ByteScheduler(pulls="arrival"), profile, over_servers).wire == "fifo"
    assert make_plan(ByteScheduler(), profile, Place(Network.line(3, 0, 10**9))).wire == "fifo"
    with pytest.raises(InputError, match="pulls: got 'last', expected 'priority' or 'arrival'"):
        ByteScheduler(pulls="last")


@pytest.mark.parametrize("policy", [ByteScheduler, P3])
def test_a_slice_takes_its_credit_until_it_was_sent_or_is_acknowledged(policy):
    profile = zoo.profile("resnet50", device="m60", batch=64)
    sent, heard = (policy(**knobs).plan(profile, Network.line(3, 0, 10**9)) for knobs in ({}, {"until": "acknowledged"}))
    assert (sent.is_acknowledged, heard.is_acknowledged) == (False, True)
    assert sent.messages == heard.messages
    assert sent.fingerprint != heard.fingerprint
    assert ["until acknowledged, crosses" in plan.describe() for plan in (sent, heard)] == [False, True]
    assert b"acknowledged" not in msgspec.json.encode(sent)
    with pytest.raises(InputError, match="until: got 'read', expected 'sent' or 'acknowledged'"):
        policy(until="read")


def test_prophet_sends_before_gradient_0_only_what_fits_and_holds_the_rest():
    # Fig. 5: of gradient 1, two partitions pass before gradient 0 is ready; they go as one block
    profile = chain((25, 40, 0, 100), (0, 160, 0, 0))
    network = Network.line(2, 0, 4 * 10**9)
    plan = policies.get("prophet", partition_bytes=40).plan(profile, network)
    assert blocks(plan) == [([(0, 0, 80)], 0), ([(1, 0, 40)], 1), ([(0, 80, 80)], 1)]
    sends = simulate(plan, profile, network, 1).of("send")
    assert [(s.subject, s.start_ns - 100, s.end_ns - 100) for s in sends] == [(0, 0, 20), (1, 25, 35), (2, 35, 55)]


def test_a_block_of_several_gradients_pays_startup_once():
    profile = chain((30, 8, 0, 0), (0, 8, 0, 0), (0, 8, 0, 0))
    network = Network.line(2, 10, 10**9)
    plan = policies.get("prophet").plan(profile, network)
    # two of 8 ns and a startup of 10 pass in 30 ns
    assert blocks(plan) == [([(1, 0, 8), (0, 0, 8)], 1), ([(2, 0, 8)], 2)]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(profile=profiles(), network=networks())
def test_no_block_of_prophet_is_under_way_when_a_more_urgent_gradient_becomes_ready(profile, network):
    network = msgspec.structs.replace(network, wakeup_ns=0)  # of which the paper knows nothing
    plan = policies.get("prophet", partition_bytes=4096).plan(profile, network)
    profile = stepwise(profile)  # a step's gradients are ready with its last
    urgency = profile.urgency()
    last = profile.tensors[-1].ready_ns
    for send in simulate(plan, profile, network, 1).of("send"):
        start_ns, end_ns = (at - profile.forward_ns for at in (send.start_ns, send.end_ns))
        if start_ns >= last:
            continue
        for tensor, seen in enumerate(profile.tensors):
            if start_ns < seen.ready_ns < end_ns:
                assert urgency[tensor] > min(urgency[piece] for piece in plan.messages[send.subject].tensors)


# -- what executors refuse --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("mercury", "'packet-priority' needs gradlane's own transport"),
        ("mercury-no-preemption", "'packet-fifo' needs gradlane's own transport"),
    ],
)
def test_all_reduce_refuses_what_it_cannot_do_with_the_reason(name, fault):
    plan = policies.get(name).plan(chain((1, 8, 0, 1), (1, 8, 0, 1)), BYTE_A_NS)
    reason = why_not(plan, "all-reduce")
    assert reason is not None
    assert fault in reason
