from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given, settings
from msgspec import UNSET

from gradlane import policies
from gradlane.core.backends import why_not
from gradlane.core.bus import Bus
from gradlane.core.checks import check_plan, check_timeline
from gradlane.core.cluster import Cluster
from gradlane.core.network import CostSegment, Network, Sharing
from gradlane.core.place import Place
from gradlane.core.policy import Policy
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.errors import InputError
from gradlane.planning import catalog
from gradlane.planning.batching import best_batches
from gradlane.planning.plans import make_plan
from gradlane.planning.questions import Case, judge, judge_plan
from gradlane.planning.schedule_problem import Schedule, ScheduleProblem
from gradlane.planning.searched import Searched, starting_plans
from gradlane.sim import iteration_ns, planned_ahead, simulate
from gradlane.testing.generators import networks, planned, profiles

QUICK = Searched(moves=300)
MS = 10**6


def drawn(seed: int, most: int = 5) -> tuple[Profile, Network]:
    """A small model on a network where startup, bytes and computation all matter."""
    draw = random.Random(seed)
    count = draw.randint(2, most)
    tensors, now = [], 0
    for index in range(count):
        now += draw.randint(0, 100)
        tensors.append(TensorProfile(TensorSpec(f"t{index}", 4 * draw.randint(1, 50)), now, count - 1 - index))
    layers = tuple(Layer(f"l{index}", draw.randint(0, 150), draw.randint(0, 5)) for index in range(count))
    return Profile("drawn", "none", tuple(tensors), layers, now), Network.line(2, draw.randint(0, 120), 10**9)


def best_of_all(profile: Profile, network: Network) -> int:
    """The shortest iteration over every order of whole tensors and every merge of neighbours in it."""
    count = len(profile.tensors)
    ready = [tensor.ready_ns for tensor in profile.tensors]
    sizes = [tensor.spec.size_bytes for tensor in profile.tensors]
    steps = [layer.forward_ns + layer.update_ns for layer in profile.layers]
    later = [sum(steps[tensor.layer :]) for tensor in profile.tensors]
    best = 2**62
    for order in itertools.permutations(range(count)):
        for cuts in range(2 ** (count - 1)):
            end, worst, start = 0, profile.compute_ns, 0
            for place in range(1, count + 1):
                if place == count or cuts >> (place - 1) & 1:
                    group = order[start:place]
                    end = max(end, *(ready[t] for t in group)) + network.cost_ns(sum(sizes[t] for t in group))
                    worst = max(worst, end + max(later[t] for t in group))
                    start = place
            best = min(best, worst)
    return best


@pytest.mark.slow
def test_the_search_finds_the_best_of_all_orders_and_merges_in_nearly_every_small_case():
    near = 0
    for seed in range(60):
        profile, network = drawn(seed)
        found = Searched(moves=3_000).search(profile, network)
        best = best_of_all(profile, network)
        assert found.bound_ns <= found.iteration_ns
        assert found.bound_ns <= best
        near += found.iteration_ns <= 1.01 * best
    assert near >= 57


@pytest.mark.parametrize("seed", range(5))
def test_where_starting_a_message_takes_time_the_search_counts_it_in_the_end(seed):
    profile, network = drawn(seed)
    starting = msgspec.structs.replace(network, start_ns=200)
    found = QUICK.search(profile, starting)
    assert found.iteration_ns == iteration_ns(found.plan, profile, starting)
    for name in policies.names("all-reduce"):
        plan = make_plan(policies.get(name), profile, Place(starting))
        if not plan.second_phases:
            assert found.iteration_ns <= iteration_ns(plan, profile, starting)
    assert found.bound_ns <= found.iteration_ns


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(profile=profiles(max_tensors=15), network=networks())
def test_what_is_found_is_a_plan_no_worse_than_any_other_and_not_below_the_bound(profile, network):
    found = QUICK.search(profile, network)
    check_plan(found.plan, profile.specs)
    assert why_not(found.plan, "all-reduce") is None
    assert why_not(found.plan, "server", external=True) is None
    check_timeline(simulate(found.plan, profile, network), found.plan)
    assert planned_ahead(found.plan, profile, network) == found.plan
    assert found.bound_ns <= found.iteration_ns == iteration_ns(found.plan, profile, network)
    for name in policies.names("all-reduce"):
        plan = policies.get(name).plan(profile, network)
        if len(plan.lanes) == 1 and not plan.second_phases:  # what interrupts or halves a message is not sought
            assert found.iteration_ns <= iteration_ns(plan, profile, network)
    assert QUICK.search(profile, network) == found


def of_devices(seed: int) -> tuple[Profile, Network]:
    """A model on hosts of several devices, whose messages within and between hosts take times like its layers'."""
    draw = random.Random(seed)
    count = draw.randint(2, 10)
    tensors, now = [], 0
    for index in range(count):
        now += draw.randint(0, 3 * MS)
        tensors.append(TensorProfile(TensorSpec(f"t{index}", 4 * draw.randint(1, 2_000_000)), now, count - 1 - index))
    layers = tuple(Layer(f"l{index}", draw.randint(0, 2 * MS)) for index in range(count))
    bus = Bus(draw.choice((2, 4, 8)), draw.choice((1_000, 10_000)), draw.choice((5 * 10**8, 10**9, 10**10)))
    between = CostSegment(draw.choice((30_000, 300_000)), draw.choice((10**8, 10**9, 10**10)))
    sharing = Sharing(draw.choice((1, 1, 2)))
    network = Network(4 * bus.devices, (between,), sharing=sharing, start_ns=draw.choice((0, 0, 50_000)), bus=bus)
    return Profile("of devices", "none", tuple(tensors), layers, now), network


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_the_search_loses_to_no_plan_that_it_starts_from_where_hosts_have_several_devices(first):
    for seed in range(first, first + 20):
        profile, network = of_devices(seed)
        plan = make_plan(Searched(moves=100), profile, Place(network))
        took_ns = iteration_ns(plan, profile, network)
        assert took_ns == Searched(moves=100).search(profile, network).iteration_ns
        for other in starting_plans(profile, network):
            if not other.second_phases and not any(lane.network_priority for lane in other.lanes):
                assert took_ns <= iteration_ns(other, profile, network), f"{seed}: {other.policy}"


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "bus"), [(1, UNSET), (2, UNSET), (2, Bus(2, 10_000, 10**9))])
def test_over_servers_too_it_loses_to_none_of_them(devices, bus):
    for seed in range(5):
        profile, _ = of_devices(seed)
        cluster = Cluster.homogeneous(4 * devices, 4, 10**9, colocated=True, startup_ns=30_000, devices=devices, bus=bus)
        case = Case(profile, cluster)
        found = judge(Searched(moves=100), case)
        for other in starting_plans(profile, case.place.network):
            if not other.second_phases and not any(lane.network_priority for lane in other.lanes):
                assert found.iteration_ns <= judge_plan(other, case).iteration_ns, f"{seed}: {other.policy}"


def test_halves_are_not_sought_since_not_all_servers_carry_them():
    # `dear`, with 32 MiB and 4 MiB in messages of their own, would be the best of the other policies here
    tensors = (TensorProfile(TensorSpec("b", 32 * 2**20), 54 * MS, 1), TensorProfile(TensorSpec("a", 4 * 2**20), 127 * MS, 0))
    profile = Profile("two", "none", tensors, (Layer("first", 52 * MS), Layer("second", 118 * MS)), 127 * MS)
    network = Network(2, (CostSegment(100 * MS, 10**9, latency_ns=37 * MS),), sharing=Sharing(max_in_flight=4, chunks=2))
    assert not Searched(moves=0).search(profile, network).plan.second_phases


@settings(max_examples=60, deadline=None)
@given(profile=profiles(max_tensors=7), network=networks())
def test_the_merges_in_a_given_order_are_the_best(profile, network):
    ground = ScheduleProblem(profile, network)
    start = ground.schedule_of(planned("wfbp", profile, network))
    merged = best_batches(ground, start, profile.compute_ns)
    pieces = [piece for group in start.groups for piece in group.pieces]
    best = start.value
    for cuts in range(2 ** (len(pieces) - 1)):
        edges = [0, *(place for place in range(1, len(pieces)) if cuts >> (place - 1) & 1), len(pieces)]
        parts = [pieces[begin:end] for begin, end in itertools.pairwise(edges)]
        if all(len({profile.tensors[piece.tensor].spec.dtype for piece in part}) == 1 for part in parts):
            best = min(best, Schedule(ground, [ground.group(part) for part in parts]).value)
    # bisection stops within some thousandths of the way to the bound
    assert best <= merged.value <= best + (start.value - profile.compute_ns) // 500 + 2


def test_nothing_is_sought_where_the_bound_is_reached():
    profile = Profile("one", "none", (TensorProfile(TensorSpec("a", 100), 5, 0),), (Layer("only", 10),), 5)
    told: list[float] = []
    found = Searched().search(profile, Network.line(2, 7, 10**9), lambda part, best_ns: told.append(part))
    assert (found.iteration_ns, found.bound_ns, found.distance) == (122, 122, 0.0)
    assert told == [1.0]


def test_progress_is_told_and_never_gets_worse():
    profile, network = drawn(11, 12)
    told: list[tuple[float, int]] = []
    found = Searched(moves=2_000).search(profile, network, lambda part, best_ns: told.append((part, best_ns)))
    assert [part for part, _ in told][:2] == [0.0, 0.25]
    assert told[-1] == (1.0, found.iteration_ns)
    assert [best for _, best in told] == sorted((best for _, best in told), reverse=True)


@pytest.mark.slow
def test_another_seed_is_another_search():
    differs = 0
    for case in range(8):
        profile, network = drawn(case, 30)
        differs += len({Searched(moves=500, seed=seed).plan(profile, network).fingerprint for seed in range(3)}) > 1
    assert differs > 0


# -- the catalog ------------------------------------------------------------------------------------------


def test_the_catalog_has_the_policies_and_searched_last():
    assert catalog.names() == (*policies.names(), "searched")
    assert catalog.names("all-reduce")[-2:] == (policies.names("all-reduce")[-1], "searched")
    assert catalog.get("searched", moves=5) == Searched(moves=5)
    assert catalog.get("p3") == policies.get("p3")
    assert isinstance(catalog.get("searched"), Policy)


@pytest.mark.parametrize(
    ("arguments", "knobs", "fault"),
    [
        (("fast",), {}, "got 'fast', expected one of wfbp, .*, searched"),
        (("searched",), {"speed": 1}, r"policy searched: got knob 'speed' .*, expected moves, seed"),
        (("searched",), {"moves": -1}, "moves: got -1"),
        (("p3",), {"speed": 1}, "policy p3: got knob 'speed'"),
    ],
)
def test_what_is_not_in_the_catalog_is_refused(arguments, knobs, fault):
    with pytest.raises(InputError, match=fault):
        catalog.get(*arguments, **knobs)
