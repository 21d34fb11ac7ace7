"""Sharding: which packets a job's messages are cut into, and which server gets each.

A message is cut into equal packets, as many for each server, as gradlane's transport cuts it. A message
whose server is given is cut into packets of full size.
"""

from __future__ import annotations

import heapq

from msgspec import UNSET

from gradlane.core.cluster import Cluster
from gradlane.core.network import Network
from gradlane.core.plan import Message, returns_whole
from gradlane.core.profile import Profile
from gradlane.errors import InputError
from gradlane.sim.fabric import Job
from gradlane.units import format_bytes

MAX_PACKETS = 1_000_000  # of one iteration of a job: a second to cut
FEW_PACKETS = 5_000  # of one iteration, of all workers together
_ALIGN = 64  # packets are multiples of this many bytes


class Sharding:
    """The packets of one job, the same for all its workers. Packets of a message follow one
    another.

    A unit is what a server returns at once: where messages are returned whole all that it has of a message,
    otherwise one packet.

    Attributes:
        size, server, message, unit: of each packet its bytes and the index of its server, message
            and unit.
        first: of each message its first packet, and after the last message the number of packets.
        units: of each unit its packets, in ascending order.
    """

    def __init__(self, job: Job, cluster: Cluster) -> None:
        """Cut the messages of `job` into packets of `cluster.packet_bytes`, and give each to a
        server of `cluster`.

        Raises:
            InputError: there would be more than `MAX_PACKETS`.
        """
        plan = job.plan
        runs_of = [_runs(job, message, cluster) for message in plan.messages]
        packets = sum(-(-run_bytes // packet_bytes) for runs in runs_of for run_bytes, packet_bytes, _ in runs)
        if packets > MAX_PACKETS:
            raise InputError(
                f"packets: got {packets} of {format_bytes(plan.size_bytes)} for {len(cluster.servers)} servers, expected at "
                f"most {MAX_PACKETS}; simulate fewer servers, or a file of a cluster, packet_bytes above {cluster.packet_bytes}"
            )
        by_packet = not returns_whole(plan.wire)
        self.size: list[int] = []
        self.server: list[int] = []
        self.message: list[int] = []
        self.unit: list[int] = []
        self.first: list[int] = []  # by message, and one more
        self.units: list[list[int]] = []
        dealer = _Dealer([server.weight for server in cluster.servers])
        for index, runs in enumerate(runs_of):
            self.first.append(len(self.size))
            units: dict[int, int] = {}
            for run_bytes, packet_bytes, placed in runs:
                for start in range(0, run_bytes, packet_bytes):
                    size_bytes = min(packet_bytes, run_bytes - start)
                    server = dealer.deal(size_bytes) if placed is None else placed
                    if by_packet or server not in units:
                        units[server] = len(self.units)
                        self.units.append([])
                    self.units[units[server]].append(len(self.size))
                    self.size.append(size_bytes)
                    self.server.append(server)
                    self.message.append(index)
                    self.unit.append(units[server])
        self.first.append(len(self.size))


def few_packets(profile: Profile, where: Network | Cluster) -> bool:
    """Whether the gradients of a profile are so few packets that each can be simulated, with every worker, in tens of
    milliseconds an iteration. An all-reduce has none.

    Where hosts have several devices, workers hand over messages in one order only if that is fixed.
    """
    if isinstance(where, Network) or where.bus is not UNSET:
        return False
    packets = profile.size_bytes // where.packet_bytes + len(profile.tensors) * len(where.servers)
    return packets * len(where.workers) <= FEW_PACKETS


def imbalance_bytes(cluster: Cluster, size_bytes: int) -> int:
    """How many bytes more than its share a server of `cluster` is dealt at most, of messages of `size_bytes` together.

    A server gets a packet when no other has fewer bytes for its weight, so that a packet is the most. Of servers of one
    weight each gets as many packets of a message, unless these are so many and small that a few less are enough. Alignment
    makes each packet longer by up to `_ALIGN`, and rounding makes each server's share longer by up to a byte.
    """
    servers = len(cluster.servers)
    if len({server.weight for server in cluster.servers}) > 1:
        return cluster.packet_bytes
    share_bytes = -(-size_bytes // servers)
    return min(cluster.packet_bytes, (_ALIGN + 1) * servers * -(-share_bytes // cluster.packet_bytes))


def _runs(job: Job, message: Message, cluster: Cluster) -> list[tuple[int, int, int | None]]:
    """The parts of a message that are cut into packets each: its bytes, those of a packet, and its server; None: all."""
    if job.placement is None:
        # a message is cut as a whole, whatever slices it has
        return [(message.size_bytes, _even(message.size_bytes, cluster), None)]
    servers = [job.placement[piece.tensor] for piece in message.slices]
    return [
        (piece.size_bytes, _even(piece.size_bytes, cluster) if server is None else cluster.packet_bytes, server)
        for piece, server in zip(message.slices, servers, strict=True)
    ]


def _even(size_bytes: int, cluster: Cluster) -> int:
    """The packet size that gives all servers equally many packets, as few as possible."""
    share = -(-size_bytes // len(cluster.servers))
    packets = -(-share // cluster.packet_bytes)
    return min(cluster.packet_bytes, -(-share // (packets * _ALIGN)) * _ALIGN)


class _Dealer:
    """Gives each packet to the server whose bytes are fewest for its weight; ties go to the lower
    index.
    """

    def __init__(self, weights: list[int]) -> None:
        self._weights = weights
        self._heap = [(0.0, index) for index in range(len(weights))]

    def deal(self, size_bytes: int) -> int:
        """The server of the next packet, which has `size_bytes` bytes."""
        dealt, server = self._heap[0]
        heapq.heapreplace(self._heap, (dealt + size_bytes / self._weights[server], server))
        return server
