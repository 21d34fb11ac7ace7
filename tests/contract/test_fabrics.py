"""What every simulated network of gradlane promises."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from gradlane.core.bus import Bus
from gradlane.core.cluster import Cluster, Host, Link, RateStep, Server, Worker
from gradlane.core.network import CostSegment, Network, Sharing
from gradlane.sim.bounds import lower_bound_ns
from gradlane.sim.collectives import CollectiveFabric, carrier
from gradlane.sim.fluid import FluidFabric
from gradlane.sim.hosts import HostFabric
from gradlane.sim.norms import NormsFabric
from gradlane.sim.packets import PacketFabric
from gradlane.testing.fabrics import check_fabric

GIGABIT = 10**9 // 8
CHANGING = Link(GIGABIT, (RateStep(20_000, 10**6), RateStep(2_000_000, 10**9)))
LIKE = Cluster.homogeneous(3, 3, GIGABIT, colocated=True, startup_ns=30_000)
APART = Cluster.homogeneous(4, 2, GIGABIT)
UNLIKE = Cluster(
    (Host(CHANGING, Link(10**9)), Host(Link(10**8), CHANGING), Host(Link(10**9), Link(10**9))),
    (Worker(0), Worker(1), Worker(1)),
    (Server(0), Server(1, 3), Server(1)),
    startup_ns=20_000,
    sum_bytes_per_second=10**10,
    network_classes=2,
    packet_bytes=64,
)
SHARED = Network(3, (CostSegment(20_000, 10**8, latency_ns=5_000),), sharing=Sharing(2, 4, 20))
WAKING = msgspec.structs.replace(SHARED, wakeup_ns=40_000)


def is_even(message):
    return message % 2 == 0


@pytest.mark.parametrize("cluster", [LIKE, msgspec.structs.replace(LIKE, sum_bytes_per_second=10**8, network_classes=2), APART])
def test_the_flow_of_alike_workers(cluster):
    bound = partial(lower_bound_ns, where=cluster)
    check_fabric(lambda job: FluidFabric((job,), cluster), least_ns=bound)


@pytest.mark.parametrize("cluster", [LIKE, APART, UNLIKE])
def test_packets_in_step(cluster):
    ranks, bound = len(cluster.workers), partial(lower_bound_ns, where=cluster)
    check_fabric(
        lambda job: PacketFabric((job,), cluster, [(0, worker) for worker in range(ranks)], 0), ranks=ranks, least_ns=bound
    )


@pytest.mark.parametrize(("cluster", "flow"), [(LIKE, True), (LIKE, False), (UNLIKE, False)])
def test_servers_with_norms_before_second_phases(cluster, flow):
    ranks, bound = 1 if flow else len(cluster.workers), partial(lower_bound_ns, where=cluster)

    def make(job):
        between = (
            FluidFabric((job,), cluster) if flow else PacketFabric((job,), cluster, [(0, rank) for rank in range(ranks)], 0)
        )
        has_norms = job.plan.second_phases and not job.plan.has_windows  # servers refuse owners whose messages wait for room
        return NormsFabric(between, {0: job.plan} if has_norms else {}, [0] * ranks, {0: 500})

    check_fabric(make, ranks=ranks, least_ns=bound, one_order=True)


@pytest.mark.parametrize("cluster", [LIKE, UNLIKE])
def test_packets_where_each_worker_is_answered_alone(cluster):
    ranks = len(cluster.workers)
    check_fabric(
        lambda job: PacketFabric((job,), cluster, [(0, worker) for worker in range(ranks)], None),
        ranks=ranks,
        synchronous=False,
    )


@pytest.mark.parametrize("network", [Network.line(3, 30_000, GIGABIT), SHARED, WAKING])
@pytest.mark.parametrize("steps", [(), CHANGING.steps])
def test_collectives(network, steps):
    bound = {} if steps else {"least_ns": partial(lower_bound_ns, where=network)}
    check_fabric(
        lambda job: CollectiveFabric(job.plan, network, network.workers, is_even, steps),
        ranks=network.workers,
        wires=("fifo",),
        one_order=True,
        **bound,
    )


BUS = Bus(2, 3_000, 10**8, packet_bytes=20)


@pytest.mark.parametrize(("network", "steps"), [(SHARED, ()), (Network.line(2, 30_000, GIGABIT), CHANGING.steps)])
def test_collectives_of_hosts_with_two_devices(network, steps):
    network = msgspec.structs.replace(network, workers=4, bus=BUS)
    bound = {} if steps else {"least_ns": partial(lower_bound_ns, where=network)}
    check_fabric(
        lambda job: carrier(job.plan, network, 4, is_even, steps),
        ranks=4,
        wires=("fifo",),
        one_order=True,
        examples=25,
        **bound,
    )


@pytest.mark.parametrize("cluster", [LIKE, APART])
@pytest.mark.parametrize(("flow", "synchronous"), [(True, True), (False, True), (False, False)])
def test_servers_of_hosts_with_two_devices(cluster, flow, synchronous):
    hosts = len(cluster.workers)
    workers = tuple(Worker(worker.host) for worker in cluster.workers for _ in range(2))
    hosted = msgspec.structs.replace(cluster, workers=workers, bus=BUS)
    host_of = [0] if flow else [rank // 2 for rank in range(2 * hosts)]

    def make(job):
        senders = [(0, host) for host in range(hosts)]
        between = FluidFabric((job,), cluster) if flow else PacketFabric((job,), cluster, senders, 0 if synchronous else None)
        rate = cluster.as_network().bytes_per_second
        return HostFabric(
            between, job.plan, host_of, (BUS.broadcast, BUS.broadcast), BUS.packet_bytes, lambda size: rate, collective=False
        )

    bound = {"least_ns": partial(lower_bound_ns, where=hosted)} if synchronous else {}
    check_fabric(make, ranks=len(host_of), synchronous=synchronous, examples=12, **bound)
