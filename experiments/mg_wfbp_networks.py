"""MG-WFBP's K80 cluster with the constants of the authors' published script.

The paper's Fig. 4(a) has other ones (`assumptions.k80_cluster`).
"""

from __future__ import annotations

from fractions import Fraction

from gradlane.core.collectives import all_reduce
from gradlane.core.network import Network

SCRIPT_STARTUP_NS = 45_250  # of one transfer between two workers
BETA = Fraction(12, 10) / Fraction(9 * 2**30, 8)  # seconds to transfer a byte
GAMMA = Fraction(25, 10**10)  # seconds to sum a byte


def script_cluster(algorithm: str, workers: int) -> Network:
    """The cluster with `workers` workers.

    Its ring has 2 N startups, where the paper's Table 2 has 2 (N - 1).
    """
    if algorithm == "ring":
        return Network.line(workers, 2 * workers * SCRIPT_STARTUP_NS, script_ring_rate(workers), source="the authors' script")
    return all_reduce(
        algorithm, workers, startup_ns=SCRIPT_STARTUP_NS, bytes_per_second=int(1 / BETA), sum_bytes_per_second=int(1 / GAMMA)
    )


def script_ring_rate(workers: int) -> int:
    """Bytes per second of a ring of the script's constants (MG-WFBP Table 2)."""
    return int(1 / (Fraction(workers - 1, workers) * (2 * BETA + GAMMA)))
