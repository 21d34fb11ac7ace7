"""MG-WFBP's clusters: the K80s with the constants of the authors' published script, and the V100s of Fig. 4(b) and (c).

The paper's Fig. 4(a) has other constants for the K80s (`assumptions.k80_cluster`).
"""

from __future__ import annotations

from fractions import Fraction

import msgspec

from experiments.assumptions import GBIT
from gradlane.core.collectives import all_reduce
from gradlane.core.network import Network

SCRIPT_STARTUP_NS = 45_250  # of one transfer between two workers
BETA = Fraction(12, 10) / Fraction(9 * 2**30, 8)  # seconds to transfer a byte
GAMMA = Fraction(25, 10**10)  # seconds to sum a byte
# of 16 V100s on four nodes: a in ns and b in seconds a byte (Fig. 4(b) and (c)), Gbit/s of a node's link (Table 3)
V100_CLUSTERS = {"10GbE": (908_000, 7.4e-10, 10), "56GbIB": (236_000, 4.06e-10, 56)}
V100_WORKERS = 16


def script_cluster(algorithm: str, workers: int) -> Network:
    """The cluster with `workers` workers.

    Its ring has 2 N startups, where the paper's Table 2 has 2 (N - 1).
    """
    if algorithm == "ring":
        return Network.line(workers, 2 * workers * SCRIPT_STARTUP_NS, script_ring_rate(workers), source="the authors' script")
    return all_reduce(
        algorithm, workers, startup_ns=SCRIPT_STARTUP_NS, bytes_per_second=int(1 / BETA), sum_bytes_per_second=int(1 / GAMMA),
        as_printed=True,
    )  # fmt: skip


def script_ring_rate(workers: int) -> int:
    """Bytes per second of a ring of the script's constants (MG-WFBP Table 2)."""
    return int(1 / (Fraction(workers - 1, workers) * (2 * BETA + GAMMA)))


def fitted(cluster: str) -> Network:
    """A cluster of V100s by the a and b of Fig. 4, with which MG-WFBP plans."""
    startup_ns, seconds_a_byte, _ = V100_CLUSTERS[cluster]
    return Network.line(V100_WORKERS, startup_ns, int(1 / seconds_a_byte))


def over_its_links(cluster: str) -> Network:
    """The same, where no byte takes less than a ring of these workers needs on a node's link (Table 2)."""
    startup_ns, seconds_a_byte, gbit = V100_CLUSTERS[cluster]
    least = 2 * (V100_WORKERS - 1) / V100_WORKERS / (gbit * GBIT)
    return Network.line(V100_WORKERS, startup_ns, int(1 / max(seconds_a_byte, least)))


def counted_twice(cluster: str) -> Network:
    """The same with twice the time per byte of Fig. 4, and no byte faster than such a ring.

    On 10GbE Fig. 4(b) has half of what its links allow at best, within 1 %, as if it counted four bytes an element (4p, below
    Fig. 4) where two were sent. So 56GbIB's is doubled too.
    """
    startup_ns, seconds_a_byte, _ = V100_CLUSTERS[cluster]
    return Network.line(V100_WORKERS, startup_ns, min(int(1 / (2 * seconds_a_byte)), over_its_links(cluster).bytes_per_second))


def startups_on_device(network: Network) -> Network:
    """The same where the startup of a message is time of the thread that computes, so that none hides another.

    A message's own bytes do not wait for it, which makes an iteration too fast by one startup at most.
    """
    (segment,) = network.segments
    return msgspec.structs.replace(
        network, segments=(msgspec.structs.replace(segment, startup_ns=0),), start_ns=segment.startup_ns
    )
