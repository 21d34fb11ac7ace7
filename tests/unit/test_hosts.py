"""Hosts with several devices: three stages, against packets one by one, closed forms and what was without them."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane import policies
from gradlane.core.bus import Bus, Stage
from gradlane.core.checks import check_timeline
from gradlane.core.cluster import Cluster, Host, Link, Server, Worker
from gradlane.core.collectives import all_reduce, flat_ring
from gradlane.core.network import Network, Sharing
from gradlane.core.place import Place
from gradlane.core.plan import Message, Plan, Slice
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.errors import InputError
from gradlane.planning.plans import make_plan
from gradlane.sim import Job, iteration_ns, planned_ahead, simulate, simulate_heterogeneous, simulate_jobs, simulate_servers
from gradlane.sim.bounds import lower_bound_ns
from gradlane.sim.collectives import CollectiveFabric
from gradlane.sim.hosts import HostFabric
from gradlane.sim.servers import simulation
from gradlane.sim.simulation import Simulation
from gradlane.testing.generators import (
    LAYERS,
    buses,
    carried,
    chain,
    hosted_networks,
    jobs,
    networks,
    profile_of,
    profiles,
)

GB = 10**9  # a byte a nanosecond
FOUR = Bus(4, 10, 3 * GB, packet_bytes=1_200)  # a packet of a reduce-scatter takes 300 ns


def hosted(network: Network, bus: Bus) -> Network:
    return msgspec.structs.replace(network, workers=network.workers * bus.devices, bus=bus)


def planned(name: str, profile: Profile, where: Network | Cluster) -> Plan:
    return make_plan(policies.get(name), profile, Place.of(where))


def alone_ns(size_bytes: int, where: Network | Cluster, name: str = "wfbp") -> int:
    """What one message takes, by simulation."""
    profile = profile_of((0, size_bytes), forward_ns=0)
    plan = planned(name, profile, where)
    if isinstance(where, Network):
        return iteration_ns(plan, profile, where)
    return simulate_servers(plan, profile, where)[0].iteration_ns()[-1]


# -- one message --------------------------------------------------------------------------------------------


def test_a_message_by_hand():
    # 9000 bytes: 30 + 2250 within the host, 100 + 9000 between hosts, 30 + 2250 within; packets of 1200 follow one another
    network = hosted(Network.line(2, 100, GB), FOUR)
    assert alone_ns(9_000, network) == 30 + 300 + 100 + 9_000 + 300
    # of one packet, one stage after another
    assert alone_ns(1_200, network) == 30 + 300 + 100 + 1_200 + 30 + 300
    # where the bus is the slowest, its last stage has the most to do
    slow = hosted(Network.line(2, 100, 100 * GB), FOUR)
    assert alone_ns(9_000, slow) == 30 + 300 + 100 + 12 + 30 + 2_250


def test_latency_within_hosts_delays_no_other_message():
    # the bus has the most to do: 500 ns for the bytes of each, in two stages
    profile = profile_of(*[(0, 1_000)] * 3, forward_ns=0)
    for latency_ns, apart_ns in ((0, 1_500), (400, 1_100), (1_000, 500)):
        network = hosted(Network.line(2, 0, 1_000 * GB), Bus(2, 1_000, GB, latency_ns=latency_ns))
        sends = simulate(planned("wfbp", profile, network), profile, network, 1).of("send")
        begun_ns = sends[0].start_ns
        assert [span.end_ns - begun_ns for span in sends] == [3_001 + number * apart_ns for number in range(3)]


@settings(max_examples=100, deadline=None)
@given(network=hosted_networks(), size_bytes=st.integers(1, 10**8).map(lambda n: 4 * n))
def test_a_message_alone_takes_what_the_whole_path_costs(network, size_bytes):
    network = msgspec.structs.replace(network, min_message_ns=0, min_message_latency_ns=0, start_ns=0)
    # rates are whole numbers of bytes per second
    assert alone_ns(size_bytes, network) == pytest.approx(network.cost_ns(size_bytes), rel=1e-5, abs=10)


@settings(max_examples=60, deadline=None)
@given(network=hosted_networks())
def test_the_startup_and_the_rate_of_the_path_are_those_of_large_messages(network):
    assert network.path.bus is msgspec.UNSET
    rates = [network.between.bytes_per_second, network.bus.all_gather.bytes_per_second]
    assert network.bytes_per_second == network.path.bytes_per_second == pytest.approx(min(rates), abs=1)
    assert network.startup_ns >= network.between.startup_ns + network.bus.reduce_scatter.startup_ns


def test_policies_plan_with_the_whole_path():
    network = hosted(Network.line(16, 900_000, 600_000_000), Bus(8, 5_700, 12 * GB))
    profile = chain(*((200_000, size, 1, 100_000) for _ in range(12) for size in (240_000, 128, 60_000, 64)))
    for name in ("mg-wfbp", "mg-wfbp-exact", "blocks", "prophet"):
        policy = policies.get(name)
        assert planned(name, profile, network) == planned_ahead(policy.plan(profile, network.path), profile, network)
    assert network.path.segments[-1].startup_ns == 900_000 + 7 * 5_700 + 2 * -(-(2**20) * 7 // (8 * 12))


# -- packets one by one -------------------------------------------------------------------------------------


class Sent(NamedTuple):
    ready: int
    packets: int


def packet_by_packet(sent: list[Sent], network: Network) -> list[int]:
    """When each message has arrived, if every packet passes every stage by itself, first in, first out."""
    bus, rate = network.bus, network.between.bytes_per_second
    assert bus is not msgspec.UNSET
    inside = bus.reduce_scatter
    within_ns, between_ns = inside.bytes_ns(bus.packet_bytes), bus.packet_bytes * GB // rate
    free = [0, 0, 0]
    ends = []
    for message in sent:
        for packet in range(message.packets):
            now = message.ready
            for stage, (startup_ns, packet_ns) in enumerate(
                ((inside.startup_ns, within_ns), (network.between.startup_ns, between_ns), (inside.startup_ns, within_ns))
            ):
                now = free[stage] = max(free[stage], now) + (0 if packet else startup_ns) + packet_ns
        ends.append(now)
    return ends


@settings(max_examples=200, deadline=None)
@given(
    gaps=st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 12)), min_size=1, max_size=8),
    startup_ns=st.sampled_from((0, 700, 9_000)),
    rate=st.sampled_from((GB // 2, GB, 4 * GB)),
    bus=st.builds(
        Bus, st.integers(2, 5), st.sampled_from((0, 50, 800)), st.sampled_from((GB // 4, GB, 8 * GB)), st.just(1_000)
    ),
)
def test_messages_in_turn_arrive_when_their_packets_do(gaps, startup_ns, rate, bus):
    now, sent = 0, []
    for gap, packets in gaps:
        now += gap
        sent.append(Sent(now, packets))
    network = hosted(Network.line(3, startup_ns, rate), bus)
    profile = profile_of(*((each.ready, each.packets * 1_000) for each in sent))
    timeline = simulate(planned("wfbp", profile, network), profile, network, 1)
    begun = timeline.of("backward")[0].start_ns
    ends = [span.end_ns - begun for span in timeline.of("send")]
    # a message that waits for its own packets between hosts leaves the network free for the next, for a packet at most
    assert ends == pytest.approx(packet_by_packet(sent, network), abs=1_000 * GB // rate + 4)


# -- what was without them ------------------------------------------------------------------------------------


class Nothing(Stage):
    """A stage that takes no time."""

    def bytes_ns(self, size_bytes: int) -> int:
        return 0


@settings(max_examples=60, deadline=None)
@given(job=jobs(wires=("fifo",), sequenced=True), network=networks())
def test_one_device_a_host_is_to_the_nanosecond_what_it_was(job: Job, network: Network):
    def run(fabric):
        return Simulation([job], [(0, 100)], fabric, receives=bool(job.plan.second_phases)).run()

    def is_even(message):
        return message % 2 == 0

    before = CollectiveFabric(job.plan, network, 1, is_even)
    nothing = (Nothing(0, 1), Nothing(0, 1))
    around = HostFabric(
        CollectiveFabric(job.plan, network, 1, is_even), job.plan, [0], nothing, 2**20,
        lambda size_bytes: network.segment_of(size_bytes).bytes_per_second, collective=True,
    )  # fmt: skip
    assert run(around) == run(before)


@settings(max_examples=40, deadline=None)
@given(
    profile=profiles(max_tensors=10),
    network=hosted_networks(),
    name=st.sampled_from(policies.names("all-reduce", with_bus=True)),
)
def test_one_device_stands_for_all_and_the_fast_path_says_the_same(profile, network, name):
    network = msgspec.structs.replace(network, workers=2 * network.bus.devices)
    plan = planned(name, profile, network)
    alone = simulate(plan, profile, network, 3)
    check_timeline(alone, plan)
    assert alone.iteration_ns()[1:] == [iteration_ns(plan, profile, network)] * 2
    assert {each.spans for each in simulate_heterogeneous(plan, profile, network, 3)} == {alone.spans}


def test_a_host_waits_for_the_slowest_of_its_devices():
    network = hosted(Network.line(2, 100, GB), Bus(2, 10, 3 * GB))
    profile = chain((1_000, 4_000, 1, 10), (3_000, 8_000, 1, 10))
    plan = planned("wfbp", profile, network)
    even, slow = (
        simulate_heterogeneous(plan, profile, network, 2, compute_percent=(100, 100, 100, percent)) for percent in (100, 150)
    )
    late_ns = slow[0].of("send")[0].end_ns - even[0].of("send")[0].end_ns
    assert late_ns == (profile.forward_ns + 3_000) // 2


# -- bytes on the card --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hosts", "devices"), [(2, 2), (3, 4), (8, 2)])
def test_a_card_sends_twice_the_other_hosts_part_of_each_message(hosts, devices):
    # 2 (H - 1) / H of the bytes each way, where the bus is much faster
    network = hosted(all_reduce("ring", hosts, startup_ns=0, bytes_per_second=GB), Bus(devices, 0, 10**13, packet_bytes=1_000))
    assert alone_ns(48 * 10**6, network) == pytest.approx(48 * 10**6 * 2 * (hosts - 1) / hosts, rel=1e-3)


@pytest.mark.parametrize("hosts", [1, 2, 5])
def test_one_host_alone_sends_nothing(hosts):
    network = hosted(all_reduce("ring", hosts, startup_ns=50, bytes_per_second=GB), Bus(4, 10, GB, packet_bytes=1_000))
    inside = 2 * 30 + 750 + 10**6 * 3 // 4
    assert (alone_ns(10**6, network) <= inside + 200) == (hosts == 1)


def bytes_on_a_card(order: list[tuple[int, int]], size_bytes: int) -> float:
    """The bytes that leave the busiest host in a ring through (host, device) in this order."""
    count = len(order)
    each = size_bytes / count * 2 * (count - 1)
    leaves = [host for (host, _), (to, _) in zip(order, order[1:] + order[:1], strict=True) if host != to]
    return each * max((leaves.count(host) for host, _ in order), default=0)


@pytest.mark.parametrize(("hosts", "devices"), [(2, 2), (3, 4), (2, 8)])
def test_a_ring_through_all_devices_passes_a_card_as_often_as_its_order_says(hosts, devices):
    by_host = [(host, device) for host in range(hosts) for device in range(devices)]
    in_turns = [(host, device) for device in range(devices) for host in range(hosts)]
    size_bytes = 10**8
    for order, crossings in ((by_host, 1), (in_turns, devices)):
        network = flat_ring(hosts, Bus(devices, 0, 10**13), startup_ns=0, bytes_per_second=GB, crossings=crossings)
        assert network.workers == hosts * devices
        assert network.cost_ns(size_bytes) == pytest.approx(bytes_on_a_card(order, size_bytes), rel=1e-6)


def test_steps_of_a_flat_ring_cost_what_the_link_they_pass_does():
    bus = Bus(4, 3_000, 12 * GB)
    ring = flat_ring(16, bus, startup_ns=30_000, bytes_per_second=GB)
    assert ring.startup_ns == 2 * 16 * 30_000 + 2 * (63 - 16) * 3_000
    assert flat_ring(1, bus, startup_ns=30_000, bytes_per_second=GB).startup_ns == 6 * 3_000
    in_turns = flat_ring(16, bus, startup_ns=30_000, bytes_per_second=GB, crossings=4)
    assert in_turns.startup_ns == all_reduce("ring", 64, startup_ns=30_000, bytes_per_second=GB).startup_ns
    with pytest.raises(InputError, match="crossings: got 5, expected an integer from 1 to 4"):
        flat_ring(2, bus, startup_ns=0, bytes_per_second=1, crossings=5)


# -- servers ------------------------------------------------------------------------------------------------


def servers(hosts: int, devices: int, *, reduced: bool, colocated: bool = True, startup_ns: int = 0) -> Cluster:
    bus = Bus(devices, 10, 3 * GB, packet_bytes=1_200) if reduced else msgspec.UNSET
    return Cluster.homogeneous(hosts * devices, hosts, GB, colocated=colocated, startup_ns=startup_ns, devices=devices, bus=bus)


def test_one_message_over_servers_by_hand():
    # summed along a chain of four, pushed and pulled beside one another, and passed along the chain again
    assert alone_ns(9_000, servers(2, 4, reduced=True, colocated=False), "mercury") == 30 + 400 + 9_000 + 400
    assert alone_ns(9_000, servers(2, 4, reduced=False, colocated=False), "mercury") == 4 * 9_000
    # on shared hosts the same bytes each way as a ring between hosts has
    assert alone_ns(9_000, servers(3, 4, reduced=True), "wfbp") == pytest.approx(30 + 400 + 12_000 + 400, abs=2)
    assert alone_ns(9_000, servers(3, 4, reduced=False), "wfbp") == pytest.approx(4 * 12_000, abs=2)


MANY = chain(*((200_000, size, 1, 100_000) for _ in range(8) for size in (240_000, 128, 60_000, 64)))


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(("colocated", "name"), [(False, "wfbp"), (True, "mercury"), (True, "bytescheduler")])
def test_packets_of_hosts_that_are_alike_take_about_what_the_flow_does(reduced, colocated, name):
    cluster = msgspec.structs.replace(servers(3, 2, reduced=reduced, colocated=colocated), packet_bytes=3_000)
    plan = planned(name, MANY, cluster)
    (flow,) = simulate_servers(plan, MANY, cluster)
    timelines = simulation([Job(plan, MANY)], cluster, whole=True).run()[0]
    assert len(timelines) == 6
    for packets in timelines:
        check_timeline(packets, plan)
        assert packets.iteration_ns()[-1] == pytest.approx(flow.iteration_ns()[-1], rel=0.06)


def test_several_jobs_on_hosts_that_sum_first_are_refused():
    cluster = servers(2, 2, reduced=True)
    job = Job(planned("wfbp", MANY, cluster), MANY)
    with pytest.raises(InputError, match="jobs: got 2, expected one on all workers, where hosts sum messages first"):
        simulate_jobs((job, job), cluster)


def test_every_host_has_the_devices_of_the_bus():
    link = Link(GB)
    with pytest.raises(InputError, match="workers: got 1, expected the 2 of the bus on host 1"):
        Cluster((Host(link, link),) * 2, (Worker(0), Worker(0), Worker(1)), (Server(0),), bus=Bus(2, 0, GB))
    with pytest.raises(InputError, match="workers: got 7, expected a multiple of the 2 devices of a host"):
        msgspec.structs.replace(Network.line(8, 0, GB), workers=7, bus=Bus(2, 0, GB))


# -- bounds -------------------------------------------------------------------------------------------------


def test_the_bound_by_hand():
    # the startup within the host, both between hosts one after another, and the second layer: 40 is too late for both at once
    profile = chain((10, 4_000, 1, 20), (30, 4_000, 2, 40))
    network = hosted(Network.line(2, 5, GB), FOUR)
    assert lower_bound_ns(profile, network) == 30 + 30 + (5 + 4_000) + (5 + 4_000) + 42
    # a bus that is slower than the network: both at once from 40 on, through three startups and the last stage
    slow = hosted(Network.line(2, 5, 100 * GB), FOUR)
    assert lower_bound_ns(profile, slow) == 40 + 30 + 5 + (30 + 2_000) + 42


@settings(max_examples=100, deadline=None)
@given(
    profile=profiles(max_tensors=12),
    network=hosted_networks(),
    name=st.sampled_from(policies.names("all-reduce", with_bus=True)),
)
def test_no_policy_beats_the_bound_over_all_reduce(profile, network, name):
    plan = planned(name, profile, network)
    assert profile.compute_ns <= lower_bound_ns(profile, network) <= iteration_ns(plan, profile, network)


def every_plan(profile: Profile) -> list[Plan]:
    """All merges of whole tensors, in every order."""
    tensors = range(len(profile.tensors))
    found = []
    for of_group in itertools.product(tensors, repeat=len(tensors)):
        if all(group in range(max(of_group[:place], default=-1) + 2) for place, group in enumerate(of_group)):
            merged = [[tensor for tensor in tensors if of_group[tensor] == group] for group in range(max(of_group) + 1)]
            whole = [
                Message(tuple(Slice(tensor, 0, profile.tensors[tensor].spec.size_bytes) for tensor in one)) for one in merged
            ]
            for order in itertools.permutations(range(len(whole))):
                plan = Plan("drawn", profile.model, profile.specs, tuple(whole), crosses_barrier=True)
                found.append(plan.with_sequence(order))
    return found


@settings(max_examples=40, deadline=None)
@given(
    layers=LAYERS.filter(lambda layers: len(layers) <= 4),
    startup=st.sampled_from([0, 20, 100]),
    rate=st.sampled_from([GB // 2, GB, 10 * GB]),
    bus=st.builds(Bus, st.integers(2, 4), st.sampled_from([0, 5, 40]), st.sampled_from([GB // 2, 4 * GB]), st.just(16)),
    at_once=st.integers(1, 2),
)
def test_the_best_of_all_merges_in_all_orders_is_not_below_the_bound(layers, startup, rate, bus, at_once):
    profile = chain(*layers)
    network = msgspec.structs.replace(hosted(Network.line(2, startup, rate), bus), sharing=Sharing(at_once))
    best = min(iteration_ns(plan, profile, network) for plan in every_plan(profile))
    assert lower_bound_ns(profile, network) <= best


@settings(max_examples=60, deadline=None)
@given(
    profile=profiles(max_tensors=8, max_elements=20_000),
    hosts=st.integers(1, 3),
    count=st.integers(1, 3),
    rate=st.integers(10**7, 10**10),
    colocated=st.booleans(),
    bus=buses(),
    reduced=st.booleans(),
    percent=st.sampled_from((100, 130)),
    data=st.data(),
)
def test_no_policy_beats_the_bound_over_servers(profile, hosts, count, rate, colocated, bus, reduced, percent, data):
    bus = msgspec.structs.replace(bus, devices=2)
    cluster = Cluster.homogeneous(
        2 * hosts, hosts if colocated else count, rate, colocated=colocated, startup_ns=30_000, devices=2,
        bus=bus if reduced else msgspec.UNSET,
    )  # fmt: skip
    workers = (msgspec.structs.replace(cluster.workers[0], compute_percent=percent), *cluster.workers[1:])
    cluster = msgspec.structs.replace(cluster, workers=workers)
    plan = planned(data.draw(st.sampled_from(carried(cluster))), profile, cluster)
    slowest = max(timeline.iteration_ns()[-1] for timeline in simulate_servers(plan, profile, cluster))
    assert lower_bound_ns(profile, cluster) <= slowest


def test_devices_of_unlike_speed_hand_over_messages_in_one_order():
    """One is ready with the last gradient when the other is not, and each has a message of its own in its window."""
    tensors = tuple(
        TensorProfile(TensorSpec(f"t{n}", 8, "float64"), ready_ns, 0) for n, ready_ns in enumerate((0, 0, 0, 23_348))
    )
    profile = Profile("drawn", "none", tensors, (Layer("l0", 0),), 23_348)
    cluster = Cluster.homogeneous(2, 1, 51_612_904, startup_ns=30_000, devices=2, bus=Bus(2, 0, 40_609_138, 1000))
    slower, other = cluster.workers
    cluster = msgspec.structs.replace(cluster, workers=(msgspec.structs.replace(slower, compute_percent=130), other))
    plan = planned("tictac", profile, cluster)
    first, second = (timeline.iteration_ns() for timeline in simulate_servers(plan, profile, cluster))
    assert len(first) == len(second) == 3
    assert first[1:] == second[1:]
