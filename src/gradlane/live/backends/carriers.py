"""Carriers: all-reduce and servers beside the ranks in one session, between which its plans choose.

Each plan names what carries it (`Plan.backend`). Plans change between two iterations, when nothing
is under way, so that no sum moves from one carrier to the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from msgspec import UNSET

from gradlane.core.backends import BackendName
from gradlane.core.plan import Plan
from gradlane.errors import CapacityError, JobError, PeerError
from gradlane.live.backends.all_reduce import AllReduceBackend
from gradlane.live.backends.base import Backend, Measured, Sums
from gradlane.live.backends.gradient_buffers import MessageBuffer
from gradlane.live.backends.parameter_server import ParameterServerBackend
from gradlane.live.backends.probe import slowest_of
from gradlane.transport import NodeOptions
from gradlane.units import NS_PER_SECOND, format_bytes

log = logging.getLogger("gradlane")

CONNECT_S = 5.0
"""Seconds in which every rank has to reach every other one's server; otherwise all-reduce carries."""
PACKET_BYTES = (NodeOptions.packet_bytes, 128 << 10, 512 << 10)
"""Packets that are measured, the smallest first: it can be ordered best."""
_NEARLY = 1.05  # the smallest packet stays whose streams take at most this many times the least time
# a stream of 4 MiB; if one takes longer than this, the links set the pace and not the packets
_STREAM_BYTES, _LINK_BOUND_NS = 256 << 10, 100_000_000
_BUDGET_S = 0.4  # to measure servers in, beside the time that measuring all-reduce takes
_CAUSES = 3  # reasons told at most why the own ports are not used
_STREAMS = 5  # that are timed for each size of packet


class Carriers:
    """A `Backend` over two others; its methods are documented there. Messages are in CPU memory.

    Plans that name no carrier are carried by all-reduce, which also has the control group. If the
    node of the servers fails while all-reduce carries, the next plan over servers fails the job.

    Args:
        all_reduce: carries the first plan.
        servers: connected; `all_reduce.control_group` is its control group too.
    """

    has_streams = False
    lost: frozenset[int] = frozenset()

    def __init__(self, all_reduce: AllReduceBackend, servers: ParameterServerBackend) -> None:
        self._carriers: dict[BackendName, AllReduceBackend | ParameterServerBackend] = {
            "all-reduce": all_reduce,
            "server": servers,
        }
        self._all_reduce, self._servers = all_reduce, servers

    @property
    def control_group(self) -> Any:
        """All-reduce's, whatever carries the plan in force."""
        return self._all_reduce.control_group

    @property
    def control_device(self) -> torch.device:
        return self._all_reduce.control_device

    def measure(self) -> Measured:
        """Choose the size of packets, and measure the networks of both carriers (collective)."""
        sums = self._all_reduce.measure_sums()
        if "network" in self._servers.levels:  # memory has no packets
            _choose_packets(self._servers, self.control_group)
        return Measured({"all-reduce": sums, "server": self._servers.measure_streams(_BUDGET_S)}, self._servers.packet_bytes)

    def take_over(self, measured: Measured) -> None:
        for each in (self._all_reduce, self._servers):
            each.take_over(measured)

    def prepare(self, plan: Plan, buffers: Sequence[MessageBuffer]) -> Sums:
        """Take up a plan, over the carrier that it names (collective)."""
        carrier = self._all_reduce if plan.backend is UNSET else self._carriers[plan.backend]
        return carrier.prepare(plan, buffers)

    def interrupt(self) -> None:
        """Nothing is on a device: nothing to do."""

    def close(self, failure: JobError | None) -> None:
        """Close both, all-reduce last."""
        self._servers.close(failure)
        self._all_reduce.close(failure)


def with_servers(
    all_reduce: AllReduceBackend,
    connect: Callable[[], ParameterServerBackend],
    store: Any,
    rank: int,
    ranks: Sequence[int],
    timeout_s: float,
) -> Backend:
    """`all_reduce` beside servers if every rank can connect, else alone (collective).

    If they cannot, rank 0 logs one line that names a rank and the address that it did not reach.

    Args:
        all_reduce: of this job.
        connect: connects this rank with the servers, within `CONNECT_S`.
        store: for this session alone.
        rank: of this process in the session's group.
        ranks: numbers of the group's ranks in the whole job, for messages.
        timeout_s: seconds to wait for what the other ranks say.

    Raises:
        CapacityError: a host has no memory for its ranks to share.
        JobError: a rank does not say whether it can connect.
    """
    servers, reason = None, ""
    lacks: CapacityError | None = None
    try:
        servers = connect()
    except JobError as error:
        # a peer that has given up before says itself why: this rank only lost its connection, or was
        # told that its own server was not reached
        is_cause = "cannot be reached" in str(error) and f"server {rank} at" not in str(error)
        follows = isinstance(error, PeerError) and not is_cause
        reason = f"{int(follows)} rank {ranks[rank]}: {error}"
        lacks = error if isinstance(error, CapacityError) else None
        # frames that refer to it would keep what they made, process groups too, until garbage is collected
        error.__traceback__ = None
    store.set(f"carriers/{rank}", reason)
    keys = [f"carriers/{each}" for each in range(dist.get_world_size(all_reduce.control_group))]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
        reasons = [text for key in keys if (text := bytes(store.get(key)).decode())]
    except RuntimeError as error:
        failure = JobError(
            f"rank {ranks[rank]}: not every rank said whether it reaches the others within {timeout_s:.0f} s ({error})"
        )
        _close(servers, all_reduce, failure)
        raise failure from None
    if servers is not None and not reasons:
        return Carriers(all_reduce, servers)
    if lacks is not None:  # all ranks of the job hear of it
        _close(servers, all_reduce, lacks)
        raise lacks
    why = _causes_among(reasons)
    _close(servers, None, JobError(f"transport: given up, {why}"))
    if rank == 0:
        log.warning("gradlane: all-reduce carries all messages, since gradlane's own ports cannot be reached: %s", why)
    return all_reduce


def _causes_among(reasons: list[str]) -> str:
    """The reasons that follow from no other one, at most `_CAUSES` of them; each begins with 0 or 1.

    Which came first is not known: a rank that gives up closes its port, so that others are refused.
    """
    first = [reason[2:] for reason in sorted(reasons) if reason[0] == min(reasons)[0]]
    return "; ".join(first[:_CAUSES]) + (f"; and {len(first) - _CAUSES} more ranks" if len(first) > _CAUSES else "")


def _close(servers: ParameterServerBackend | None, all_reduce: AllReduceBackend | None, failure: JobError) -> None:
    for each in (servers, all_reduce):
        if each is not None:
            each.close(failure)


def _choose_packets(servers: ParameterServerBackend, group: Any) -> None:
    """Time streams with packets of each size, and go on with the smallest whose streams take at most
    5 % longer than the best (collective).

    If a stream of 4 MiB with the smallest packets takes longer than 100 ms, the links set the pace. No other size is measured
    then, as that would take long and tell nothing.
    """
    taken_ns: dict[int, int] = {}
    for packet_bytes in PACKET_BYTES:
        servers.use_packets(packet_bytes)
        taken_ns[packet_bytes] = _time_streams(servers, group)
        if taken_ns[packet_bytes] > _LINK_BOUND_NS:
            break
    best_ns = min(taken_ns.values())
    kept = next(packet_bytes for packet_bytes, ns in taken_ns.items() if ns <= best_ns * _NEARLY)
    servers.use_packets(kept)
    if dist.get_rank(group) == 0:
        rates = ", ".join(
            f"{format_bytes(size)} {servers.stream_bytes(_STREAM_BYTES) * NS_PER_SECOND / ns / 1e6:.0f} MB/s"
            for size, ns in taken_ns.items()
        )
        log.info("gradlane: packets of %s (%s)", format_bytes(kept), rates)


def _time_streams(servers: ParameterServerBackend, group: Any) -> int:
    """The least time of a stream on its slowest rank, in ns; the same on every rank (collective).

    The least, since whatever else disturbs the machine makes a stream longer.
    """
    first_ns = slowest_of(group, torch.device("cpu"), [servers.time_stream(_STREAM_BYTES)])[0]
    repeats = 1 if first_ns > _LINK_BOUND_NS else _STREAMS
    return min(slowest_of(group, torch.device("cpu"), [servers.time_stream(_STREAM_BYTES) for _ in range(repeats)]))
