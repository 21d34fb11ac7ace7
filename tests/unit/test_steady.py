"""The fast path of all-reduce says what the simulation says, to the nanosecond; and the walk over the layers, by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane import policies, zoo
from gradlane.core.network import CostSegment, Network, Sharing
from gradlane.core.place import Place
from gradlane.core.plan import Lane, Plan
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.core.timeline import Timeline
from gradlane.errors import PlanError
from gradlane.planning.plans import make_plan
from gradlane.sim import iteration_ns, planned_ahead, simulate, simulate_heterogeneous, steady_iteration
from gradlane.sim.passes import PPM, ForwardPass, forward_ends
from gradlane.testing.generators import networks, plans, profiles

SHARED = Network(
    2, (CostSegment(400_000, 10**9, latency_ns=150_000),), sharing=Sharing(2, 2, 1_000_000), min_message_ns=300_000
)


def starts(timeline: Timeline, iteration: int) -> list[int]:
    """The messages of an iteration, in the order in which they were started; the simulator keeps it among equals."""
    return [span.subject for span in timeline.of("send") if span.iteration == iteration]


def check_equal(plan: Plan, profile: Profile, network: Network) -> None:
    """The fast path and the simulation say the same of `plan`, in all iterations."""
    timeline = simulate(plan, profile, network, 3)
    expected = [iteration_ns(plan, profile, network)] * 3
    # before the first iteration nothing is waited for, and its step has no updates across the barrier
    assert timeline.iteration_ns()[1:] == expected[1:]
    assert timeline.iteration_ns()[0] <= expected[0]
    assert steady_iteration(plan, profile, network) == (expected[0], timeline.hidden())
    assert starts(timeline, 0) == starts(timeline, 2) == list(planned_ahead(plan, profile, network).sequence or ())


@settings(max_examples=150, deadline=None)
@given(
    profile=profiles(max_tensors=16),
    network=networks(),
    name=st.sampled_from(policies.names("all-reduce")),
    ahead=st.booleans(),
)
def test_every_policy_on_any_network(profile: Profile, network: Network, name: str, ahead: bool) -> None:
    check_equal(make_plan(policies.get(name), profile, Place(network, coordinated=not ahead)), profile, network)


@settings(max_examples=150, deadline=None)
@given(plan=plans(), network=networks(), crosses=st.booleans(), classes=st.booleans(), data=st.data())
def test_any_plan_at_all(plan: Plan, network: Network, crosses: bool, classes: bool, data: st.DataObject) -> None:
    count = len(plan.tensors)
    ready = sorted(data.draw(st.lists(st.integers(0, 10_000), min_size=count, max_size=count)))
    used_by = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    tensors = tuple(TensorProfile(*each) for each in zip(plan.tensors, ready, used_by, strict=True))
    layers = (Layer("l0", 100, 7), Layer("l1", 0), Layer("l2", 5_000))
    messages = tuple(msgspec.structs.replace(each, two_phase=data.draw(st.booleans())) for each in plan.messages)
    lanes = tuple(Lane(lane.window_bytes, index * classes) for index, lane in enumerate(plan.lanes))
    plan = msgspec.structs.replace(plan, messages=messages, lanes=lanes, crosses_barrier=crosses)
    check_equal(plan, Profile("drawn", "none", tensors, layers, ready[-1] + 50), network)


@pytest.mark.parametrize("name", policies.names("all-reduce"))
@pytest.mark.parametrize("network", [Network.line(3, 50_000, 10**9), SHARED], ids=["line", "shared"])
def test_networks_of_the_zoo(name: str, network: Network) -> None:
    profile = zoo.profile("resnet18")
    plan = make_plan(policies.get(name), profile, Place(network))
    check_equal(plan, profile, network)
    together = simulate_heterogeneous(plan, profile, network, 2)
    alone = simulate(plan, profile, network, 2)
    assert {timeline.spans for timeline in together} == {alone.spans}


def test_what_all_reduce_cannot_carry_out_is_refused_by_both() -> None:
    profile = zoo.profile("alexnet")
    plan = policies.get("mercury").plan(profile, SHARED)
    for simulator in (simulate, simulate_heterogeneous, iteration_ns, planned_ahead):
        with pytest.raises(PlanError):
            simulator(plan, profile, SHARED)


# -- the walk -----------------------------------------------------------------------------------------------


@dataclass
class Notes:
    """What a forward pass tells."""

    seen: list[tuple[str, int, int, int]] = field(default_factory=list)

    def waited(self, layer: int, start_ns: int, end_ns: int) -> None:
        self.seen.append(("waited", layer, start_ns, end_ns))

    def updated(self, layer: int, start_ns: int, end_ns: int) -> None:
        self.seen.append(("updated", layer, start_ns, end_ns))

    def ran(self, layer: int, start_ns: int, end_ns: int) -> None:
        self.seen.append(("ran", layer, start_ns, end_ns))


THREE = Profile(
    "three",
    "none",
    (TensorProfile(TensorSpec("b", 8), 10, 2), TensorProfile(TensorSpec("a", 8), 20, 0)),
    (Layer("l0", 100, 10), Layer("l1", 200), Layer("l2", 300, 30)),
    20,
)


def test_across_the_barrier_each_layer_waits_for_its_own_tensors() -> None:
    notes = Notes()
    walk = ForwardPass(THREE, True, notes)
    arrived = [50, 0, 500]
    assert walk.begin(20, arrived) == 20
    assert walk.run(range(2), 20, arrived) == 50 + 10 + 100 + 200
    assert walk.run(range(2, 3), 360, arrived) == 500 + 30 + 300
    assert notes.seen == [
        ("waited", 0, 20, 50),
        ("updated", 0, 50, 60),
        ("ran", 0, 60, 160),
        ("updated", 1, 160, 160),
        ("ran", 1, 160, 360),
        ("waited", 2, 360, 500),
        ("updated", 2, 500, 530),
        ("ran", 2, 530, 830),
    ]
    assert forward_ends(THREE, [500, 50], crosses_barrier=True) == 830


def test_behind_the_barrier_all_updates_follow_the_last_arrival() -> None:
    notes = Notes()
    walk = ForwardPass(THREE, False, notes)
    arrived = [50, 0, 500]
    begun = walk.begin(20, arrived)
    assert begun == 500 + 40
    assert walk.run(range(3), begun, arrived) == 540 + 600
    assert notes.seen == [
        ("waited", -1, 20, 500),
        ("updated", 0, 500, 510),
        ("updated", 1, 510, 510),
        ("updated", 2, 510, 540),
        ("ran", 0, 540, 640),
        ("ran", 1, 640, 840),
        ("ran", 2, 840, 1_140),
    ]
    assert forward_ends(THREE, [500, 50], crosses_barrier=False) == 1_140


def test_uncovered_time_follows_the_updates_behind_the_barrier_and_hides_messages_across_it() -> None:
    profile = msgspec.structs.replace(THREE, uncovered_ns=70)
    behind, across = ForwardPass(profile, False), ForwardPass(profile, True)
    assert behind.begin(20, [50, 0, 500]) == 500 + 40 + 70
    assert behind.begin(20, [50, 0, 500], 2 * PPM, 0) == 500 + 140
    assert across.begin(20, [50, 0, 500]) == 20 + 70
    # the first layer's tensor, there at 50, costs nothing, and the third's still comes at 500
    assert forward_ends(profile, [500, 50], crosses_barrier=True) == 500 + 30 + 300
    assert forward_ends(profile, [0, 50], crosses_barrier=True) == 20 + 70 + 10 + 100 + 200 + 30 + 300 == profile.compute_ns


@pytest.mark.parametrize("crosses_barrier", [False, True])
def test_times_are_scaled_and_servers_that_update_take_the_updates_away(crosses_barrier: bool) -> None:
    walk, arrived = ForwardPass(THREE, crosses_barrier), [0, 0, 0]
    begun = walk.begin(0, arrived, update_ppm=0)
    assert begun == 0
    assert walk.run(range(3), begun, arrived, 2 * PPM, 0) == 1_200
    assert walk.run_freely(range(3), 5, PPM // 2) == 305


@settings(max_examples=100, deadline=None)
@given(profile=profiles(max_tensors=12), crosses_barrier=st.booleans(), data=st.data())
def test_a_walk_in_parts_ends_where_the_whole_one_does(profile: Profile, crosses_barrier: bool, data: st.DataObject) -> None:
    count = len(profile.tensors)
    arrivals = data.draw(st.lists(st.integers(0, 10**7), min_size=count, max_size=count))
    latest = [0] * len(profile.layers)
    for tensor, arrived in zip(profile.tensors, arrivals, strict=True):
        latest[tensor.layer] = max(latest[tensor.layer], arrived)
    walk = ForwardPass(profile, crosses_barrier)
    now = walk.begin(profile.backward_ns, latest)
    cut = data.draw(st.integers(0, len(latest)))
    now = walk.run(range(cut, len(latest)), walk.run(range(cut), now, latest), latest)
    assert now == forward_ends(profile, arrivals, crosses_barrier)
