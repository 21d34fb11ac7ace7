from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane import policies
from gradlane.core.cluster import Cluster, Host, Link, Server, Worker
from gradlane.core.network import CostSegment, Network
from gradlane.core.place import Place
from gradlane.core.plan import WIRES, Lane, Message, Plan, Slice
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.planning.plans import make_plan
from gradlane.sim import iteration_ns, simulate_servers, simulate_steady
from gradlane.sim.bounds import _all_arrive_ns, _all_reduce_cost, _bound, efficiency, lower_bound_ns, oracle_ns
from gradlane.testing.generators import LAYERS, carried, chain, clusters, networks, planned, profiles
from gradlane.testing.oracles import mercury_optimum
from tests.unit import random_bounds
from tests.unit.best_schedules import Best

BYTE_A_NS = Network.line(2, startup_ns=0, bytes_per_second=10**9)


def test_the_oracle_is_computation_alone_and_linear_scaling_its_multiple():
    profile = chain((10, 40, 1, 20), (30, 40, 2, 40))
    assert oracle_ns(profile) == 103
    assert efficiency(profile, 206) == 0.5
    assert efficiency(profile, oracle_ns(profile)) == 1


def test_the_bound_by_hand():
    # t0 of 40 bytes arrives at 40 + 45 or later and both layers follow: 148; t1's 40, ready at 30, go before it or with
    # it, both have arrived at 30 + 45 + 45 or later, and the second layer follows
    profile = chain((10, 40, 1, 20), (30, 40, 2, 40))
    network = Network.line(2, 5, 10**9)
    assert lower_bound_ns(profile, network) == 30 + 45 + 45 + 42
    # the longer the second layer runs, the less t1 matters
    profile = chain((10, 40, 1, 40), (30, 40, 2, 40))
    assert lower_bound_ns(profile, network) == 40 + 45 + 83
    # all is hidden: t1 passes before t0 is ready, which does not matter when it is 8 bytes in 13 ns
    profile = chain((100, 8, 0, 20), (30, 80, 0, 40))
    assert lower_bound_ns(profile, network) == 130 + 13 + 60


def test_messages_that_pass_in_uncovered_time_are_hidden_from_the_bound():
    # t0's 8 bytes arrive 13 after the backward pass, which is nothing beside 50 of uncovered time
    profile = msgspec.structs.replace(chain((100, 8, 0, 20), (30, 80, 0, 40)), uncovered_ns=50)
    network = Network.line(2, 5, 10**9)
    assert oracle_ns(profile) == lower_bound_ns(profile, network) == 130 + 50 + 60
    fast = Cluster.homogeneous(2, 2, 10**9)
    slow = msgspec.structs.replace(fast, workers=tuple(Worker(each.host, 150) for each in fast.workers))
    assert (lower_bound_ns(profile, fast), lower_bound_ns(profile, slow)) == (240, 360)


def test_messages_of_the_size_that_is_cheapest_by_the_byte_bound_a_network_of_pieces():
    # large messages cost 2 ns a byte, small ones 1 ns and a startup of 100 for at most 200: 1.5 ns a byte
    network = Network(2, (CostSegment(100, 10**9, up_to_bytes=200), CostSegment(0, 5 * 10**8)))
    assert lower_bound_ns(chain((0, 2_000, 0, 0)), network) == 3_000


def test_the_bound_knows_that_a_late_gradient_costs_a_startup_of_its_own():
    # two of 40 bytes are ready at 10 and 4 more at 100; all together at 100 would end at 100 + 50 + 84
    profile = chain((90, 4, 0, 0), (0, 40, 0, 0), (10, 40, 0, 0))
    assert lower_bound_ns(profile, Network.line(2, 50, 10**9)) == 10 + 50 + 80 + 50 + 4


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    gradients=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 50)), min_size=1, max_size=8),
    startup=st.sampled_from([0, 3, 20, 100]),
)
def test_the_last_arrival_is_that_of_the_best_of_all_merges(gradients, startup):
    gradients.sort()
    best = min(
        merged_end([gradients[i:j] for i, j in itertools.pairwise((0, *cuts, len(gradients)))], startup)
        for count in range(len(gradients))
        for cuts in itertools.combinations(range(1, len(gradients)), count)
    )
    assert _all_arrive_ns(gradients, startup, 10**9) == best


def merged_end(groups, startup):
    end = 0
    for group in groups:
        end = max(end, group[-1][0]) + startup + sum(size for _, size in group)
    return end


UNIT = 100  # bytes: what the best of all messages is cut and merged of


@settings(max_examples=300, deadline=None)
@given(
    gradients=st.lists(st.tuples(st.integers(0, 3_000), st.integers(1, 3)), min_size=1, max_size=4),
    pieces=st.lists(
        st.tuples(st.integers(1, 7), st.sampled_from([0, 50, 300, 1_000]), st.sampled_from([10**9, 5 * 10**8, 2 * 10**8])),
        min_size=1,
        max_size=3,
        unique_by=lambda piece: piece[0],
    ),
)
def test_no_message_beats_the_bound_on_a_network_of_pieces(gradients, pieces):
    gradients.sort()
    profile, network = of_units(gradients, pieces)
    assert lower_bound_ns(profile, network) <= best_messages(gradients, network)


@pytest.mark.slow
def test_the_bound_on_networks_of_pieces_is_near_what_the_best_messages_reach():
    draw, gaps = random.Random(0), []
    for _ in range(500):
        gradients = sorted((draw.randint(0, 3_000), draw.randint(1, 3)) for _ in range(draw.randint(1, 4)))
        pieces = [
            (limit, draw.choice((0, 50, 300, 1_000)), 10**9 // draw.choice((1, 2, 5)))
            for limit in draw.sample(range(1, 8), draw.randint(2, 3))
        ]
        profile, network = of_units(gradients, pieces)
        gaps.append(best_messages(gradients, network) / lower_bound_ns(profile, network) - 1)
    assert sorted(gaps)[450] < 0.14  # 9 of 10
    assert sum(gap < 0.001 for gap in gaps) > 300


def of_units(gradients, pieces):
    """A model of one layer, whose gradients are (ready_ns, units); and a network of pieces, (units, startup_ns, rate)."""
    tensors = tuple(TensorProfile(TensorSpec(f"t{i}", size * UNIT), ready, 0) for i, (ready, size) in enumerate(gradients))
    *limited, last = sorted(pieces)
    segments = [CostSegment(startup, rate, limit * UNIT) for limit, startup, rate in limited]
    network = Network(2, (*segments, CostSegment(last[1], last[2])))
    return Profile("units", "none", tensors, (Layer("l", 0),), gradients[-1][0]), network


def best_messages(gradients, network):
    """When the last of all units arrives at the earliest: of all ways to cut them, in order of readiness, into messages."""
    ready = [ready_ns for ready_ns, units in gradients for _ in range(units)]
    ends = [0]
    for j, ready_ns in enumerate(ready):
        ends.append(min(max(ends[i], ready_ns) + network.cost_ns((j + 1 - i) * UNIT) for i in range(j + 1)))
    return ends[-1]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(profile=profiles(), network=networks(), name=st.sampled_from(policies.names("all-reduce")))
def test_no_policy_beats_the_bound_over_all_reduce(profile, network, name):
    plan = policies.get(name).plan(profile, network)
    assert oracle_ns(profile) <= lower_bound_ns(profile, network) <= iteration_ns(plan, profile, network)


@settings(max_examples=100, deadline=None)
@given(layers=LAYERS)
def test_the_bound_is_reached_by_mercury_where_packets_are_small_and_free(layers):
    # with a startup of nothing and immediate preemption the bound is no estimate but the optimum
    profile, cluster = chain(*layers), Cluster.homogeneous(2, 2, 10**9)
    assert lower_bound_ns(profile, BYTE_A_NS) == lower_bound_ns(profile, cluster) == mercury_optimum(layers)
    (timeline,) = simulate_servers(make_plan(policies.get("mercury"), profile, Place.of(cluster)), profile, cluster)
    assert timeline.iteration_ns()[-1] == mercury_optimum(layers)


@settings(max_examples=60, deadline=None)
@given(
    profile=profiles(max_tensors=12),
    workers=st.integers(1, 4),
    servers=st.integers(1, 4),
    rate=st.integers(10**7, 10**10),
    colocated=st.booleans(),
    startup=st.sampled_from([0, 30_000]),
    data=st.data(),
)
def test_no_policy_beats_the_bound_over_servers(profile, workers, servers, rate, colocated, startup, data):
    servers = workers if colocated else servers
    cluster = Cluster.homogeneous(workers, servers, rate, colocated=colocated, startup_ns=startup)
    name = data.draw(st.sampled_from(carried(cluster)))
    plan = planned(name, profile, cluster)
    (timeline,) = simulate_servers(plan, profile, cluster)
    assert lower_bound_ns(profile, cluster) <= timeline.iteration_ns()[-1]


def test_the_bound_over_servers_does_not_round_in_its_own_favour():
    # a rate that three workers' shares do not divide
    cluster = Cluster.homogeneous(3, 3, 12_737_105, colocated=True)
    for size_bytes in range(600_000, 640_000, 328):
        profile = Profile("one", "none", (TensorProfile(TensorSpec("t", size_bytes), 0, 0),), (Layer("l", 0),), 0)
        plan = planned("wfbp", profile, cluster)
        (timeline,) = simulate_servers(plan, profile, cluster)
        assert lower_bound_ns(profile, cluster) <= timeline.iteration_ns()[-1]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    profile=profiles(max_tensors=10, max_elements=40_000),
    cluster=clusters(),
    data=st.data(),
)
def test_no_policy_beats_the_bound_on_a_cluster_of_any_kind(profile, cluster, data):
    name = data.draw(st.sampled_from(carried(cluster)))
    plan = planned(name, profile, cluster)
    assert lower_bound_ns(profile, cluster) <= simulate_steady(plan, profile, cluster).iteration_ns


@pytest.mark.parametrize("narrow", ["up", "down"])
def test_a_worker_with_a_narrow_link_bounds_the_cluster(narrow):
    wide, slow = Link(10**12), Link(10**9)
    slow_host = Host(slow, wide) if narrow == "up" else Host(wide, slow)
    cluster = Cluster((slow_host, Host(wide, wide), Host(wide, wide)), (Worker(0), Worker(1)), (Server(2),))
    assert lower_bound_ns(chain((5, 4_000, 0, 7)), cluster) == 5 + 4_000 + 7


@pytest.mark.slow
def test_a_bound_of_very_many_layers_takes_some_of_them():
    profile = chain(*[(1, 4, 0, 1)] * 2_100)
    bound = lower_bound_ns(profile, BYTE_A_NS)
    assert profile.compute_ns < bound <= iteration_ns(policies.get("tictac").plan(profile, BYTE_A_NS), profile, BYTE_A_NS)


def test_the_bound_of_workers_that_share_a_link_is_that_of_those_who_take_turns():
    # two workers on each of two hosts, and a server: a host passes 120 kB in an iteration, which takes 1.2 ms. But its
    # workers need not begin together: each waits for both pushes and for its own sum alone, 0.9 ms
    tensor = TensorProfile(TensorSpec("t", 60_000), 384_546, 0)
    profile = Profile("two by two", "none", (tensor,), (Layer("l", 867_244),), 384_546)
    cluster = Cluster.homogeneous(4, 2, 10**8, colocated=True, devices=2)
    message = Message((Slice(0, 0, 60_000),))
    for wire in WIRES:
        plan = Plan("whole", profile.model, profile.specs, (message,), (Lane(),), wire, crosses_barrier=True)
        timelines = simulate_servers(plan, profile, cluster, 30, whole=True)
        assert {took_ns for timeline in timelines for took_ns in timeline.iteration_ns()[2:]} == {profile.compute_ns + 900_000}
    # one of the servers may have 130 bytes more than the other, since packets are aligned
    assert profile.compute_ns + 900_000 - 1_300 <= lower_bound_ns(profile, cluster) <= profile.compute_ns + 900_000


def test_what_stays_on_a_host_costs_nothing():
    profile = chain((5, 4_000_000, 0, 7), (5, 4_000_000, 0, 7))
    for devices in (1, 3):
        cluster = Cluster.homogeneous(devices, 1, 10**7, colocated=True, devices=devices)
        assert lower_bound_ns(profile, cluster) == profile.compute_ns


def test_the_busiest_link_bounds_an_iteration_however_workers_take_turns():
    # eight workers a host push 1 MB each, at 1 ns a byte; a host's turn of 4.5 MB is less, with next to no computing
    profile = chain((0, 1_000_000, 0, 0))
    cluster = Cluster.homogeneous(16, 2, 10**9, colocated=True, devices=8)
    assert lower_bound_ns(profile, cluster) == 8_000_000


UNIT_NS = 1_000  # of a packet of 30 kB on a link
SHAPES = [  # of the hosts of workers, and of servers
    ([0], [0]), ([0], [1]), ([0, 0], [0]), ([0, 0], [1]), ([0, 1], [0]), ([0, 1], [2]), ([0, 1], [0, 1]), ([0, 1], [2, 2]),
    ([0, 0, 1], [0]), ([0, 0, 1], [1]), ([0, 0, 1], [2]), ([0, 0, 1], [0, 1]), ([0, 0, 1, 1], [0]), ([0, 0, 1, 1], [0, 1]),
    ([0, 0, 0, 1], [0, 1]), ([0, 1, 2], [0]), ([0, 1, 2], [0, 1]),
]  # fmt: skip


@pytest.mark.parametrize("computes", [1, 4])
@pytest.mark.parametrize(("workers", "servers"), SHAPES)
def test_no_schedule_at_all_beats_the_bound_over_servers(workers, servers, computes):
    size_bytes = 30_000 * len(servers)
    tensor = TensorProfile(TensorSpec("t", size_bytes), computes * UNIT_NS, 0)
    profile = Profile("one", "none", (tensor,), (Layer("l", 0),), computes * UNIT_NS)
    link = Link(30_000 * 10**9 // UNIT_NS)
    hosts = (Host(link, link),) * (1 + max(*workers, *servers))
    cluster = Cluster(hosts, tuple(Worker(host) for host in workers), tuple(Server(host) for host in servers))
    bound_ns, best = lower_bound_ns(profile, cluster), Best(workers, servers, computes)
    for iterations in (1, 3):
        assert iterations * bound_ns <= best.units(iterations) * UNIT_NS


def test_the_bound_is_reached_where_workers_of_a_host_take_turns():
    best = Best([0, 0, 1, 1], [0, 1], 4)
    assert best.units(3) - best.units(2) == 4 + 3


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, 20))
def test_no_simulator_beats_the_bound_on_random_clusters(first):
    # python -m tests.unit.random_bounds --cases 20000
    for seed in range(first, first + 20):
        random_bounds.check(seed)


@settings(max_examples=300, deadline=None)
@given(profile=profiles(max_tensors=24), network=networks(), percent=st.sampled_from([50, 100, 130]), updates=st.booleans())
def test_the_bound_is_the_greatest_over_all_times_and_layers(profile, network, percent, updates):
    cost_ns = _all_reduce_cost(network.between)
    layers = [
        layer.forward_ns * percent // 100 + (layer.update_ns * percent // 100 if updates else 0) for layer in profile.layers
    ]
    found = [profile.backward_ns * percent // 100 + profile.uncovered_ns * percent // 100 + sum(layers)]
    for index in range(len(layers)):
        size_bytes = 0
        for tensor in reversed(profile.tensors):
            if tensor.layer <= index:
                size_bytes += tensor.spec.size_bytes
                if any(each.layer == index for each in profile.tensors):
                    found.append(tensor.ready_ns * percent // 100 + cost_ns(size_bytes) + sum(layers[index:]))
    assert _bound(profile, cost_ns, percent, updates) == max(found)
