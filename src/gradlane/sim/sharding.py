"""Deal: which packets a job's messages are cut into, and which server gets each."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from gradlane.core.cluster import Cluster
from gradlane.sim.fabric import Job


class Sharding:
    """The packets of one job, the same for all its workers; packets of a message are neighbours.

    A unit is what a server returns at once: on a "fifo" wire what it has of a message, else one packet.
    """

    def __init__(self, job: Job, cluster: Cluster) -> None:
        plan = job.plan
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
                # a message is one run of bytes, whatever slices it has
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
    """Deals packets so that each server's bytes stay near its share by weight; ties go to the lower index."""

    def __init__(self, weights: list[int]) -> None:
        self._weights = weights
        self._heap = [(0.0, index) for index in range(len(weights))]

    def deal(self, size_bytes: int) -> int:
        dealt, server = self._heap[0]
        heapq.heapreplace(self._heap, (dealt + size_bytes / self._weights[server], server))
        return server
