"""What all of these simulations assume: one set for all papers; 1 to 4 were chosen before any figure was looked at.

1. Models come from gradlane's zoo, on the device and with the batch size that a paper states.
   Tensors are exact. Times are counted, and calibrated to a total where a paper states one
   (`gradlane zoo NAME` says which). No paper's times per layer are known, except for MG-WFBP's
   recording of GoogLeNet.
2. An all-reduce costs what MG-WFBP fitted on its first cluster of 16 GPUs: a startup of a = 0.972
   ms, and b = 1.97 ns per byte. These are taken as those of a ring. The startup and the time per
   byte between two nodes follow from them, and so do the costs for other numbers of workers and for
   other algorithms (its Table 2). Its Figs. 6, 7 and 10 count with the constants of the authors'
   published script for the same cluster, and are also shown with these.
3. A sender spends 0.3 ms on each message to parameter servers before the message's bytes go
   (ByteScheduler §4.1). Summing takes no time. Links carry their nominal rate in both directions at
   once, without loss. Unless a paper says otherwise, there are as many servers as workers, they run
   on hosts of their own, and bytes are distributed over them evenly.
4. A framework's default is `wfbp`. ByteScheduler has the best partition and credit of a grid that
   is tried in the simulator. BytePS is ByteScheduler with the sizes that are BytePS's defaults, 4 MB and no limit on pushes.
   Servers return sums in order of arrival (`pulls="arrival"`): by its source ByteScheduler's released code pulls a partition
   as soon as it is pushed, and schedules pushes alone. The policy's own default is the order of Theorem 1.
5. Where a paper says otherwise of its own testbed, its rows have that, and its remarks say what.
   Some of this was put in after a first comparison; rows that begin with "tried" take it out.
"""

from __future__ import annotations

from fractions import Fraction

import msgspec

from gradlane.core.cluster import Cluster
from gradlane.core.collectives import all_reduce
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.policy import Policy
from gradlane.core.profile import Profile
from gradlane.planning import catalog
from gradlane.planning.plans import make_plan
from gradlane.planning.questions import Case, Outcome, judge, knob_grid
from gradlane.sim import Job, simulate_jobs

MESSAGE_STARTUP_NS = 300_000
_A_NS, _B = 972_000, Fraction(197, 10**11)  # seconds a byte, MG-WFBP Fig. 4(a)
_FITTED_WORKERS = 16
BYTESCHEDULER = catalog.get("bytescheduler", pulls="arrival")
KEY_FACTOR = 9973  # of kvstore_dist: a key times this, modulo the servers
DIVIDED_ELEMENTS = 10**6  # its MXNET_KVSTORE_BIGARRAY_BOUND
SOCKET_BYTES = 4_194_304  # the largest that Linux gives a sending socket by itself (tcp_wmem)
GBIT = 10**9 // 8


def k80_cluster(algorithm: str, workers: int) -> Network:
    """MG-WFBP's cluster 1, scaled to `workers`."""
    startup_ns = _A_NS // (2 * (_FITTED_WORKERS - 1))
    seconds_a_byte = _B / (2 * Fraction(_FITTED_WORKERS - 1, _FITTED_WORKERS))
    rate = int(1 / seconds_a_byte)
    return all_reduce(algorithm, workers, startup_ns=startup_ns, bytes_per_second=rate, as_printed=True)


def servers(workers: int, bytes_per_second: int, *, colocated: bool = False) -> Cluster:
    return Cluster.homogeneous(workers, workers, bytes_per_second, colocated=colocated, startup_ns=MESSAGE_STARTUP_NS)


def bytescheduler_grid(case: Case, policy: Policy = BYTESCHEDULER) -> list[tuple[int, int, Outcome]]:
    """(partition, credit, outcome) in bytes, with a credit of one partition and of four."""
    sizes = [2**power for power in range(18, 26)]
    return [entry for size in sizes for entry in knob_grid(policy, case, [size], [size, 4 * size])]


def tuned_bytescheduler(case: Case, policy: Policy = BYTESCHEDULER) -> tuple[int, int, Outcome]:
    """The best of `bytescheduler_grid`."""
    return min(bytescheduler_grid(case, policy), key=iteration_ns_of)


def iteration_ns_of(entry: tuple[int, int, Outcome]) -> int:
    """The iteration time of an entry of `bytescheduler_grid`."""
    return entry[2].iteration_ns


def dealt_ns(profile: Profile, where: Cluster, *, divided_elements: int | None = None) -> int:
    """Iteration time of the default where each whole tensor goes to one server.

    Args:
        profile, where: what is simulated.
        divided_elements: tensors of so many elements or more are divided over all servers, and the others go by
            number, as MXNet's kvstore_dist has it (EncodeDefaultKey). None: all go to the next server each.
    """
    plan = make_plan(catalog.get("wfbp"), profile, Place.of(where))
    last = len(profile.tensors) - 1
    in_turn: tuple[int | None, ...] = tuple((last - tensor) % len(where.servers) for tensor in range(last + 1))
    if divided_elements is not None:
        in_turn = tuple(
            None if seen.spec.size_bytes >= 4 * divided_elements else (last - tensor) * KEY_FACTOR % len(where.servers)
            for tensor, seen in enumerate(profile.tensors)
        )
    coarse = msgspec.structs.replace(where, packet_bytes=1 << 20)  # every worker is simulated
    (timelines,) = simulate_jobs((Job(plan, profile, in_turn),), coarse, 2)
    return max(timeline.iteration_ns()[-1] for timeline in timelines)


def speed(name: str, profile: Profile, where: Network | Cluster) -> float:
    """Iterations per second of a policy."""
    return 1e9 / judge(catalog.get(name), Case(profile, where), bound_ns=0).iteration_ns
