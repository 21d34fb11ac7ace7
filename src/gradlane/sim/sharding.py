"""Sharding: which packets a job's messages are cut into, and which server gets each."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from gradlane.core.cluster import Cluster
from gradlane.errors import InputError
from gradlane.sim.fabric import Job
from gradlane.units import format_bytes

MAX_PACKETS = 1_000_000  # of one iteration of a job: a second to cut


class Sharding:
    """The packets of one job, the same for all its workers. Packets of a message follow one
    another.

    A unit is what a server returns at once: with the wire "fifo" all that it has of a message,
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
        packets = plan.size_bytes // cluster.packet_bytes + len(plan.messages)
        if packets > MAX_PACKETS:
            raise InputError(
                f"packet_bytes: got {cluster.packet_bytes}, with which {format_bytes(plan.size_bytes)} of {plan.model} are "
                f"{packets} packets, expected at most {MAX_PACKETS}; simulate with larger packets"
            )
        by_packet = plan.wire != "fifo"
        self.size: list[int] = []
        self.server: list[int] = []
        self.message: list[int] = []
        self.unit: list[int] = []
        self.first: list[int] = []  # by message, and one more
        self.units: list[list[int]] = []
        dealer = _Dealer([server.weight for server in cluster.servers])
        for index, message in enumerate(plan.messages):
            self.first.append(len(self.size))
            units: dict[int, int] = {}
            if job.placement is None:
                # a message is cut as a whole, whatever slices it has
                runs: Sequence[tuple[int, int | None]] = [(message.size_bytes, None)]
            else:
                runs = [(piece.size_bytes, job.placement[piece.tensor]) for piece in message.slices]
            for run_bytes, placed in runs:
                for start in range(0, run_bytes, cluster.packet_bytes):
                    size_bytes = min(cluster.packet_bytes, run_bytes - start)
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
