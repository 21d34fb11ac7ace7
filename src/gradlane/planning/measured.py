"""Measured: what the simulator runs for a network that a live run measured.

A live run measures startup and rate of lone messages (`planning.fit`). For all-reduce that is the
simulator's network. Servers are simulated link by link, so their links get the rate that gives lone
messages the measured one.

Workers that are all alike can be simulated as one, with packets that are infinitely small. Where a plan
has few packets they are not small beside its messages, and all are simulated (`sim.few_packets`).
"""

from __future__ import annotations

from gradlane.core.cluster import Cluster
from gradlane.core.fields import MAX_RATE
from gradlane.core.network import Network
from gradlane.core.place import Place


def where(place: Place) -> Network | Cluster:
    """The network or cluster to simulate for a place whose network was measured there.

    Servers in processes of their own are assumed to have hosts of their own. Where the network has a
    bus, the ranks of a host have one server together.
    """
    if place.backend == "all-reduce":
        return place.network
    network, servers = place.network, place.servers
    between, hosts = network.between, network.hosts
    # the inverse of Cluster.as_network: the links' rate that gives a lone message the measured rate
    share = max(1.0, hosts / servers if servers else 2 * (hosts - 1) / hosts)
    rate = min(MAX_RATE, max(1, round(between.bytes_per_second * share)))
    return Cluster.homogeneous(
        network.workers, servers or hosts, rate, colocated=servers == 0, startup_ns=between.startup_ns, network_classes=1,
        devices=network.workers // hosts, bus=network.bus,
    )  # fmt: skip
