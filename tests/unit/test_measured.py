"""What is simulated for a network that a live run measured."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane.core.bus import Bus
from gradlane.core.cluster import Cluster
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.planning.measured import where


@settings(deadline=None)
@given(hosts=st.integers(2, 6), devices=st.integers(1, 4), servers=st.integers(0, 3), rate=st.integers(10**6, 10**10))
def test_a_cluster_has_the_cost_of_the_network_that_was_measured(hosts: int, devices: int, servers: int, rate: int) -> None:
    network = Network.line(hosts, 50_000, rate)
    if devices > 1:
        network = Network(hosts * devices, network.segments, bus=Bus(devices, 5_000, 10**10))
    cluster = where(Place(network, "server", servers))
    assert isinstance(cluster, Cluster)
    assert (len(cluster.workers), cluster.is_homogeneous, cluster.bus) == (hosts * devices, True, network.bus)
    for size_bytes in (1_000, 10**6, 10**8):
        found, expected = cluster.between.as_network().cost_ns(size_bytes), network.between.cost_ns(size_bytes)
        assert abs(found / expected - 1) < 1e-3
