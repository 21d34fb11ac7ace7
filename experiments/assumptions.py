"""What all of these simulations assume: one set for all papers, chosen before any figure was looked at.

1. Models are the zoo's, on the device and with the batch that a paper states: exact tensors, times counted and
   calibrated to one total where a paper states one (`gradlane zoo NAME` says which). No per-layer time of any paper's
   testbed is known, but for MG-WFBP's recording of GoogLeNet.
2. All-reduce costs what MG-WFBP fitted on its first cluster: a = 0.972 ms and b = 1.97 ns a byte on 16 GPUs, taken as
   a ring, from which follow the startup between two nodes and the time per byte for other numbers of workers and for
   other algorithms (its Table 2).
3. A message handed to parameter servers costs its sender 0.3 ms before its bytes go (ByteScheduler §4.1); summing takes
   no time. Links carry their nominal rate each way at once, without loss. Servers: as many as workers, on hosts of
   their own unless the paper says otherwise; bytes are dealt to them evenly unless it says otherwise.
4. A framework's default is `wfbp`. ByteScheduler is tuned by trying a grid of partitions and credits in the simulator.
   BytePS is not here.
"""

from __future__ import annotations

from fractions import Fraction

from gradlane.core.cluster import Cluster
from gradlane.core.collectives import all_reduce
from gradlane.core.network import Network
from gradlane.core.profile import Profile
from gradlane.planning import catalog
from gradlane.planning.questions import Case, Outcome, judge, knob_grid

MESSAGE_STARTUP_NS = 300_000
_A_NS, _B = 972_000, Fraction(197, 10**11)  # seconds a byte, MG-WFBP Fig. 4(a)
_FITTED_WORKERS = 16
GBIT = 10**9 // 8


def k80_cluster(algorithm: str, workers: int) -> Network:
    """MG-WFBP's cluster 1, scaled to `workers`."""
    startup_ns = _A_NS // (2 * (_FITTED_WORKERS - 1))
    seconds_a_byte = _B / (2 * Fraction(_FITTED_WORKERS - 1, _FITTED_WORKERS))
    return all_reduce(algorithm, workers, startup_ns=startup_ns, bytes_per_second=int(1 / seconds_a_byte))


def servers(workers: int, bytes_per_second: int, *, colocated: bool = False) -> Cluster:
    return Cluster.homogeneous(workers, workers, bytes_per_second, colocated=colocated, startup_ns=MESSAGE_STARTUP_NS)


def tuned_bytescheduler(case: Case) -> tuple[int, int, Outcome]:
    """(partition, credit, outcome) of the best of a grid, in bytes."""
    sizes = [2**power for power in range(18, 26)]
    grid = [entry for size in sizes for entry in knob_grid("bytescheduler", case, [size], [size, 4 * size])]
    return min(grid, key=lambda entry: entry[2].iteration_ns)


def speed(name: str, profile: Profile, where: Network | Cluster) -> float:
    """Iterations per second of a policy."""
    return 1e9 / judge(catalog.get(name), Case(profile, where), bound_ns=0).iteration_ns
