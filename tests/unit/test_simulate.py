from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane import policies
from gradlane.core.checks import check_timeline
from gradlane.core.network import CostSegment, Network, Sharing
from gradlane.core.plan import Lane, Message, Plan, Slice
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.core.timeline import Span
from gradlane.sim import planned_ahead, simulate, steady_iteration
from gradlane.testing.generators import networks, planned, plans, profile_of, profiles

# forward 10 + 20, backward 50, updates 1 + 2; b is ready at 20 and belongs to the second layer
TWO_LAYERS = Profile(
    "two",
    "none",
    (TensorProfile(TensorSpec("b", 40), 20, 1), TensorProfile(TensorSpec("a", 12), 50, 0)),
    (Layer("first", 10, 1), Layer("second", 20, 2)),
    50,
)
BYTE_A_NS = Network.line(2, startup_ns=5, bytes_per_second=10**9)


def last_step(name: str, profile: Profile, network: Network, **knobs: int) -> int:
    return simulate(policies.get(name, **knobs).plan(profile, network), profile, network).iteration_ns()[-1]


def test_two_layers_first_in_first_out_by_hand():
    # backward from 30 to 80; b goes 50..95, a 95..112; both updated by 115
    timeline = simulate(policies.get("wfbp").plan(TWO_LAYERS, BYTE_A_NS), TWO_LAYERS, BYTE_A_NS, iterations=1)
    assert [span for span in timeline.spans if span.iteration == 0] == [
        Span("use", 0, 1, 0, 0),
        Span("forward", 0, 0, 0, 10),
        Span("step", 0, -1, 0, 115),
        Span("use", 0, 0, 10, 10),
        Span("forward", 0, 1, 10, 30),
        Span("backward", 0, -1, 30, 80),
        Span("ready", 0, 0, 50, 50),
        Span("send", 0, 0, 50, 95),
        Span("ready", 0, 1, 80, 80),
        Span("send", 0, 1, 80, 112),  # handed over at 80, served after the first
        Span("wait", 0, -1, 80, 112),
        Span("update", 0, 1, 112, 113),
        Span("update", 0, 0, 113, 115),
    ]
    assert timeline.iteration_ns() == [115]
    assert timeline.hidden() == pytest.approx(30 / 62)


def test_a_message_of_two_phases_hides_what_passes_while_the_device_computes():
    MS = 10**6
    # 20 MB ready after 50 ms, of 70 ms of backward: 200 ms on the wire, of which 20 ms pass behind it
    profile = profile_of((50 * MS, 20 * 10**6), forward_ns=10 * MS, backward_ns=70 * MS)
    network = Network.line(2, 0, 10**8)
    for name in ("wfbp", "dear"):
        assert simulate(planned(name, profile, network), profile, network).hidden() == pytest.approx(20 / 200)
        assert steady_iteration(planned(name, profile, network), profile, network).hidden == pytest.approx(20 / 200)


def test_two_layers_across_the_barrier_by_hand():
    # stop-and-wait by priority: b goes 50..95, then a 95..112; the first layer waits until 112, updates
    # until 113 and runs until 123; the second updates until 125 and runs until 145. A wait is of the iteration whose sum
    # is waited for
    timeline = simulate(policies.get("tictac").plan(TWO_LAYERS, BYTE_A_NS), TWO_LAYERS, BYTE_A_NS, iterations=2)
    assert [span for span in timeline.spans if span.kind in ("forward", "wait", "update", "backward") and span.start_ns >= 80][
        :7
    ] == [
        Span("wait", 0, 1, 80, 112),
        Span("update", 0, 1, 112, 113),
        Span("forward", 1, 0, 113, 123),
        Span("update", 0, 0, 123, 125),
        Span("forward", 1, 1, 125, 145),
        Span("backward", 1, -1, 145, 195),
        Span("wait", 1, 1, 195, 227),
    ]
    assert timeline.iteration_ns() == [80, 115]


def test_crossing_the_barrier_hides_what_the_barrier_waits_for():
    # a (urgent, 12 bytes) is ready when b (400 bytes) has just left in slices of 40
    profile = Profile(
        "two",
        "none",
        (TensorProfile(TensorSpec("b", 400), 0, 1), TensorProfile(TensorSpec("a", 12), 50, 0)),
        (Layer("first", 500), Layer("second", 20)),
        50,
    )
    # fifo: 400 + 12 after the start of backward; two startups of 5
    assert last_step("wfbp", profile, BYTE_A_NS) == 520 + 422
    # slices of 45 ns: a goes 90..107, the other eight while the first layer runs (607)
    assert last_step("p3", profile, BYTE_A_NS, slice_bytes=40) == 520 + 107


def test_the_last_step_counts_what_the_forward_pass_after_it_waits_for_as_not_hidden():
    # one tensor of the one layer: every sending instant after backward is waited for
    profile = Profile("one", "none", (TensorProfile(TensorSpec("a", 100), 0, 0),), (Layer("only", 10),), 0)
    for name in ("wfbp", "tictac"):
        plan = policies.get(name).plan(profile, BYTE_A_NS)
        assert simulate(plan, profile, BYTE_A_NS, iterations=3).hidden() == 0.0


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(profile=profiles(), network=networks(overlapping=False, starting=False))
def test_wfbp_takes_what_equations_7_and_8_say(profile, network):
    # Eq. 7: a layer's communication starts when its gradient is ready and the one before has ended;
    # Eq. 8: forward, then the end of the last; the update and the uncovered time are ours
    end = 0
    for tensor in profile.tensors:
        end = max(end, tensor.ready_ns) + network.cost_ns(tensor.spec.size_bytes)
    expected = profile.forward_ns + max(end, profile.backward_ns) + profile.update_ns + profile.uncovered_ns
    timeline = simulate(policies.get("wfbp").plan(profile, network), profile, network)
    assert timeline.iteration_ns() == [expected] * 3


def test_starting_a_message_keeps_the_backward_pass_waiting():
    tensors = tuple(TensorProfile(TensorSpec(f"t{index}", 100), 1000 * index, 2 - index) for index in range(3))
    profile = Profile("three", "none", tensors, tuple(Layer(f"l{index}", 10) for index in range(3)), 2500)
    network = Network.line(2, 500, 10**9)
    free, starting = (
        simulate(policies.get("wfbp").plan(profile, each), profile, each)
        for each in (network, msgspec.structs.replace(network, start_ns=70))
    )
    ready = {
        span.subject: span.start_ns - starting.of("backward")[0].start_ns
        for span in starting.of("ready")
        if span.iteration == 0
    }
    assert ready == {0: 0, 1: 1070, 2: 2140}
    # the last sum ends 600 ns after its gradient; without starts at 2600, with two of them at 2740
    assert starting.iteration_ns() == [ns + 140 for ns in free.iteration_ns()] == [2740 + 30] * 3


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(profile=profiles(dtypes=("float32",)), network=networks(starting=False))
def test_sync_easgd_takes_forward_backward_one_message_and_the_updates(profile, network):
    end = profile.tensors[-1].ready_ns + network.cost_ns(profile.size_bytes)
    rest = profile.forward_ns + profile.update_ns + profile.uncovered_ns
    assert last_step("sync-easgd", profile, network) == rest + max(end, profile.backward_ns)


@settings(max_examples=30, deadline=None)
@given(profile=profiles(max_elements=1000), name=st.sampled_from(policies.names("all-reduce")))
def test_on_a_free_network_an_iteration_is_its_computation(profile, name):
    free = Network.line(2, 0, 10**13)
    knobs = {"partition_bytes": 4096} if name == "bytescheduler" else {}
    plan = policies.get(name, **knobs).plan(profile, free)
    # a message takes a nanosecond even here, since times are rounded up
    slack = sum(free.cost_ns(message.size_bytes) for message in plan.messages)
    assert profile.compute_ns <= simulate(plan, profile, free).iteration_ns()[-1] <= profile.compute_ns + slack
    assert slack <= 10 * len(profile.tensors)


@settings(max_examples=40, deadline=None)
@given(profile=profiles(), network=networks(), name=st.sampled_from(("p3", "tictac", "bytescheduler", "blocks")))
def test_no_layer_runs_before_its_tensors_arrived_and_were_updated(profile, network, name):
    plan = policies.get(name).plan(profile, network)
    timeline = simulate(plan, profile, network, iterations=2)
    arrived: dict[tuple[int, int], int] = {}
    for send in timeline.of("send"):
        for piece in plan.messages[send.subject].slices:
            key = send.iteration, piece.tensor
            arrived[key] = max(arrived.get(key, 0), send.end_ns)
    forwards = timeline.of("forward")
    assert [(span.iteration, span.subject) for span in forwards] == [
        (iteration, layer) for iteration in range(3) for layer in range(len(profile.layers))
    ]
    for forward in forwards:
        if forward.iteration > 0:
            for tensor, seen in enumerate(profile.tensors):
                if seen.layer == forward.subject:
                    update_ns = profile.layers[forward.subject].update_ns
                    assert forward.start_ns >= arrived[forward.iteration - 1, tensor] + update_ns


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(plan=plans(), profile_gaps=st.data(), network=networks(), crosses=st.booleans())
def test_any_plan_at_all_simulates_to_a_timeline_that_passes_its_check(plan, profile_gaps, network, crosses):
    count = len(plan.tensors)
    ready = sorted(profile_gaps.draw(st.lists(st.integers(0, 10_000), min_size=count, max_size=count)))
    used_by = profile_gaps.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    profile = Profile(
        "drawn",
        "none",
        tuple(TensorProfile(spec, at, layer) for spec, at, layer in zip(plan.tensors, ready, used_by, strict=True)),
        (Layer("l0", 100, 7), Layer("l1", 0), Layer("l2", 5_000)),
        ready[-1],
    )
    plan = Plan(plan.policy, plan.model, plan.tensors, plan.messages, plan.lanes, "fifo", crosses, plan.sequence)
    check_timeline(simulate(plan, profile, network), plan)
    ahead = planned_ahead(plan, profile, network)
    check_timeline(simulate(ahead, profile, network), ahead)


def test_the_network_serves_all_lanes_in_the_order_of_hand_over():
    specs = (TensorSpec("a", 20), TensorSpec("b", 4))
    profile = Profile("two", "none", tuple(TensorProfile(spec, 0, 0) for spec in specs), (Layer("only", 0),), 0)
    messages = (Message((Slice(0, 0, 20),), lane=0), Message((Slice(1, 0, 4),), lane=1))
    plan = Plan("test", "two", specs, messages, (Lane(), Lane()))
    network = Network.line(2, 0, 10**9)
    sends = simulate(plan, profile, network, iterations=1).of("send")
    assert [(send.subject, send.start_ns, send.end_ns) for send in sends] == [(0, 0, 20), (1, 0, 24)]


@pytest.mark.parametrize(("window", "in_flight", "expected"), [
    (None, 1, [(0, 0, 20), (1, 0, 24), (2, 0, 32)]),  # nobody waits for an end
    (1, 1, [(0, 0, 27), (1, 27, 38), (2, 38, 46)]),  # each waits for the one before, and nobody for the last
    (24, 2, [(0, 0, 27), (1, 0, 24), (2, 27, 35)]),  # the third waits for the first, and not for the second
])  # fmt: skip
def test_a_message_that_waited_for_room_starts_later_by_a_wakeup(window, in_flight, expected):
    sizes = (20, 4, 8)
    specs = tuple(TensorSpec(f"t{index}", size) for index, size in enumerate(sizes))
    profile = Profile("three", "none", tuple(TensorProfile(spec, 0, 0) for spec in specs), (Layer("only", 0),), 0)
    messages = tuple(Message((Slice(index, 0, size),)) for index, size in enumerate(sizes))
    plan = Plan("test", "three", specs, messages, (Lane(window_bytes=window),))
    network = msgspec.structs.replace(Network.line(2, 0, 10**9), wakeup_ns=7, sharing=Sharing(in_flight))
    sends = simulate(plan, profile, network, iterations=1).of("send")
    assert [(send.subject, send.start_ns, send.end_ns) for send in sends] == expected


def test_an_end_for_which_nothing_waits_yet_is_not_told():
    """The second gradient is ready after the first message has ended, whose end made room unheard."""
    specs = (TensorSpec("early", 20), TensorSpec("late", 4))
    ready = (0, 22)
    gradients = tuple(TensorProfile(spec, at, 0) for spec, at in zip(specs, ready, strict=True))
    profile = Profile("two", "none", gradients, (Layer("only", 0),), 22)
    messages = tuple(Message((Slice(index, 0, spec.size_bytes),)) for index, spec in enumerate(specs))
    plan = Plan("test", "two", specs, messages, (Lane(window_bytes=1),))
    network = msgspec.structs.replace(Network.line(2, 0, 10**9), wakeup_ns=7)
    sends = simulate(plan, profile, network, iterations=1).of("send")
    assert [(send.subject, send.start_ns, send.end_ns) for send in sends] == [(0, 0, 20), (1, 22, 26)]


def test_a_piecewise_network_costs_what_the_piece_of_the_size_says():
    network = Network(2, (CostSegment(1, 10**9, up_to_bytes=8), CostSegment(100, 10**9)))
    assert [network.cost_ns(size) for size in (4, 8, 9)] == [5, 9, 109]
    assert (network.startup_ns, network.bytes_per_second) == (100, 10**9)


def test_at_one_instant_a_message_arrives_before_a_gradient_becomes_ready():
    # "slow" waits behind "first" and goes at 12, when "urgent" becomes ready too
    specs = (TensorSpec("first", 12), TensorSpec("slow", 4), TensorSpec("urgent", 4))
    ready = (0, 5, 12)
    profile = Profile(
        "three",
        "none",
        tuple(TensorProfile(spec, at, 0) for spec, at in zip(specs, ready, strict=True)),
        (Layer("only", 0),),
        12,
    )
    messages = tuple(Message((Slice(index, 0, spec.size_bytes),), priority=2 - index) for index, spec in enumerate(specs))
    plan = Plan("test", "three", specs, messages, (Lane(window_bytes=1),))
    sends = simulate(plan, profile, Network.line(2, 0, 10**9), iterations=1).of("send")
    assert [(send.subject, send.start_ns, send.end_ns) for send in sends] == [(0, 0, 12), (1, 12, 16), (2, 16, 20)]
