"""Place: where a plan is carried out, as far as planning has to know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from msgspec import UnsetType

from gradlane.core.backends import BACKENDS, BackendName
from gradlane.core.cluster import Cluster
from gradlane.core.fields import need, need_int
from gradlane.core.network import MAX_WORKERS, Network


class Place(msgspec.Struct, frozen=True):
    """A network, and what carries messages there.

    Attributes:
        network: what messages cost there. Policies plan with its `path`, or with all of it (`plans_with_bus`).
        backend: "all-reduce" or "server".
        servers: number of servers in processes of their own (server backend only). 0: one server in
            each rank's process.
        coordinated: over all-reduce, rank 0 decides the order of messages during the iteration, so
            that the plan fixes none.
        in_stream: all-reduces take their turn in a stream of a device, as NCCL's do, which carries
            plans of one lane.
    """

    network: Network
    backend: BackendName = "all-reduce"
    servers: int = 0
    coordinated: bool = False
    in_stream: bool = False

    def __post_init__(self) -> None:
        need(self.backend in BACKENDS, "backend", self.backend, "'all-reduce' or 'server'")
        need_int("servers", self.servers, 0, MAX_WORKERS if self.backend == "server" else 0)

    @staticmethod
    def of(where: Network | Cluster) -> Place:
        """The place that a simulation assumes: all-reduce on a network, or servers on a cluster.

        Servers count as running in the workers' processes if every host has as many of them as
        workers; where a host's workers send as one, they count as one.
        """
        if isinstance(where, Network):
            return Place(where)
        beside = Counter(worker.host for worker in where.between.workers) == Counter(server.host for server in where.servers)
        return Place(where.as_network(), "server", 0 if beside else len(where.servers))

    @property
    def has_external_servers(self) -> bool:
        """Whether servers run in processes of their own."""
        return self.servers > 0

    @property
    def needs_sequence(self) -> bool:
        """Whether a plan must fix the order in which messages start: all ranks must issue
        collectives in one order.
        """
        return self.backend == "all-reduce" and not self.coordinated


def place_of(backend: BackendName | UnsetType, places: Sequence[Place]) -> Place:
    """The one of `places` with `backend`; the first where it is UNSET or none has it."""
    return next((place for place in places if place.backend == backend), places[0])
