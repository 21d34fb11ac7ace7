"""Measured: what the simulator runs for a network that a live run measured.

A live run measures startup and rate of lone messages (`planning.fit`). For all-reduce that is the
simulator's network. Servers are simulated link by link, so their links get the rate that gives lone
messages the measured one.
"""

from __future__ import annotations

from gradlane.core.cluster import Cluster
from gradlane.core.fields import MAX_RATE
from gradlane.core.network import Network
from gradlane.core.place import Place


def where(place: Place) -> Network | Cluster:
    """The network or cluster to simulate for a place whose network was measured there.

    Servers in processes of their own are assumed to have hosts of their own.
    """
    if place.backend == "all-reduce":
        return place.network
    network, servers, workers = place.network, place.servers, place.network.workers
    # the inverse of Cluster.as_network: the links' rate that gives a lone message the measured rate
    share = max(1.0, workers / servers if servers else 2 * (workers - 1) / workers)
    rate = min(MAX_RATE, max(1, round(network.bytes_per_second * share)))
    return Cluster.homogeneous(
        workers, servers or workers, rate, colocated=servers == 0, startup_ns=network.startup_ns, network_classes=1
    )
