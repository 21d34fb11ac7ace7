"""What is simulated for a network that a live run measured."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane import policies, zoo
from gradlane.core.bus import Bus
from gradlane.core.cluster import Cluster
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.planning.measured import where
from gradlane.planning.plans import make_plan
from gradlane.planning.questions.prediction import predict
from gradlane.planning.ranking import Question, rank
from gradlane.sim import few_packets, simulate_servers, simulate_steady


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


GOOGLENET = zoo.profile("googlenet").scaled(0.149)
FOUR_HOSTS = Network.line(4, 165_000, 19_700_000)


@pytest.mark.parametrize(("workers", "few"), [(4, True), (2048, False)])
def test_where_packets_are_few_a_prediction_has_each_of_them(workers: int, few: bool) -> None:
    place = Place(Network.line(workers, 165_000, 19_700_000), "server")
    plan = make_plan(policies.get("blocks"), GOOGLENET, place)
    cluster = where(place)
    assert isinstance(cluster, Cluster)
    assert few_packets(GOOGLENET, cluster) == few
    (flow,) = simulate_servers(plan, GOOGLENET, cluster)
    expected = flow.iteration_ns()[-1]
    if few:
        assert len(simulate_servers(plan, GOOGLENET, cluster, whole=True)) == workers
        flow_ns, expected = expected, simulate_steady(plan, GOOGLENET, cluster, whole=True).iteration_ns
        assert expected > flow_ns
    assert predict(plan, GOOGLENET, place).iteration_ns == expected


def test_the_plans_ranked_best_are_predicted_packet_by_packet() -> None:
    place = Place(FOUR_HOSTS, "server")
    cluster = where(place)
    assert isinstance(cluster, Cluster)
    best = rank(Question(GOOGLENET, (place,), 0, 2, 10**12)).worth_trying[0]
    packets = simulate_servers(best.plan, GOOGLENET, cluster, 2, whole=True)
    (flow,) = simulate_servers(best.plan, GOOGLENET, cluster, 2)
    found = best.predicted.iteration_ns
    assert found == max(timeline.iteration_ns()[-1] for timeline in packets) != flow.iteration_ns()[-1]
    assert not few_packets(GOOGLENET, where(Place(FOUR_HOSTS, "all-reduce")))
