"""Measured: what is simulated for a network that a live run measured.

A live run measures its network as startup and rate of lone messages (`tune.fit`). For all-reduce that is the simulator's
network as it stands; servers are simulated link by link, on the links that would give those lone messages their rate.
"""

from __future__ import annotations

from gradlane.core.cluster import Cluster
from gradlane.core.network import MAX_RATE, Network
from gradlane.core.place import Place


def where(place: Place) -> Network | Cluster:
    """What the simulator is to simulate for a place whose network was measured there.

    Servers in processes of their own are taken to be on hosts of their own.
    """
    if place.backend == "all-reduce":
        return place.network
    network, servers, workers = place.network, place.servers, place.network.workers
    # the other way around: what links give a lone message the measured rate (Cluster.as_network)
    share = max(1.0, workers / servers if servers else 2 * (workers - 1) / workers)
    rate = min(MAX_RATE, max(1, round(network.bytes_per_second * share)))
    return Cluster.homogeneous(
        workers, servers or workers, rate, colocated=servers == 0, startup_ns=network.startup_ns, network_classes=1
    )
