"""Cluster: workers and parameter servers on hosts, each host with a link up and a link down.

Where a `Network` says what one collective costs, a cluster says what each message's bytes pass on the way to the
servers and back. `as_network` reduces a cluster to the startup and rate that policies plan from.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_right
from collections import Counter

import msgspec

from gradlane.core.fields import MAX_BYTES, MAX_NS, need, need_int, need_name
from gradlane.core.network import MAX_RATE, MAX_WORKERS, Network
from gradlane.units import NS_PER_SECOND

MAX_STEPS = 1_000_000
NETWORK_CLASSES = 8


class RateStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """From `at_ns` on a link carries `bytes_per_second`."""

    at_ns: int
    bytes_per_second: int

    def __post_init__(self) -> None:
        need_int("at_ns", self.at_ns, 0, MAX_NS)
        need_int("bytes_per_second", self.bytes_per_second, 1, MAX_RATE)


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One direction between a host and the switch; `steps` change its rate over time, in ascending order."""

    bytes_per_second: int
    steps: tuple[RateStep, ...] = ()

    def __post_init__(self) -> None:
        need_int("bytes_per_second", self.bytes_per_second, 1, MAX_RATE)
        need(len(self.steps) <= MAX_STEPS, "steps", len(self.steps), f"at most {MAX_STEPS} of them")
        for before, after in itertools.pairwise(self.steps):
            need(before.at_ns < after.at_ns, "steps", after.at_ns, f"a time after the {before.at_ns} before it")

    def at(self, now_ns: int) -> tuple[int, int | None]:
        """Rate in bytes per second at `now_ns`, and when it changes next (None: never)."""
        place = bisect_right(self.steps, now_ns, key=lambda step: step.at_ns)
        rate = self.steps[place - 1].bytes_per_second if place else self.bytes_per_second
        return rate, self.steps[place].at_ns if place < len(self.steps) else None

    def finish_ns(self, start_ns: int, size_bytes: int) -> int:
        """When `size_bytes` that begin at `start_ns` have passed, alone on the link; rounded up."""
        if not self.steps:
            return start_ns - -size_bytes * NS_PER_SECOND // self.bytes_per_second
        left = size_bytes * NS_PER_SECOND
        while True:
            rate, changes_ns = self.at(start_ns)
            end_ns = start_ns - -left // rate
            if changes_ns is None or end_ns <= changes_ns:
                return end_ns
            left -= rate * (changes_ns - start_ns)
            start_ns = changes_ns

    @property
    def fastest(self) -> int:
        """The highest rate that the link ever has, in bytes per second."""
        return max(self.bytes_per_second, max((step.bytes_per_second for step in self.steps), default=0))


def random_steps(seed: int, low: int, high: int, every_ns: int, count: int) -> tuple[RateStep, ...]:
    """`count` rates drawn evenly from `low` to `high` bytes per second, one each `every_ns` from 0 on.

    The same for the same seed (Mercury Figs. 18, 19 limit the links of servers at random in this way).
    """
    need_int("count", count, 1, MAX_STEPS)
    need_int("every_ns", every_ns, 1, MAX_NS)
    need(0 < low <= high, "low", low, f"from 1 to {high}")
    draw = random.Random(seed)
    return tuple(RateStep(index * every_ns, draw.randint(low, high)) for index in range(count))


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine: what it can send and what it can receive at a time."""

    up: Link
    down: Link


class Worker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A worker on a host; its compute times are `compute_percent` hundredths of the profile's."""

    host: int
    compute_percent: int = 100

    def __post_init__(self) -> None:
        need_int("host", self.host, 0, MAX_WORKERS)
        need_int("compute_percent", self.compute_percent, 1, 1_000_000)


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A parameter server on a host, holding a share of the bytes in proportion to `weight`."""

    host: int
    weight: int = 1

    def __post_init__(self) -> None:
        need_int("host", self.host, 0, MAX_WORKERS)
        need_int("weight", self.weight, 1, 1_000_000)


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workers, servers and the hosts they are on.

    startup_ns: what a message costs its sender before its bytes go, one message after another (Mercury §III).
    sum_bytes_per_second: how fast a server adds a worker's bytes (None: in no time). update_bytes_per_second: how
    fast a server updates parameters; None: the workers update, as the profile says. network_classes: how many
    priority classes the fabric tells apart (1: none; lanes beyond the last share it). packet_bytes: the largest
    unit that a link serves without a pause.
    """

    hosts: tuple[Host, ...]
    workers: tuple[Worker, ...]
    servers: tuple[Server, ...]
    startup_ns: int = 0
    sum_bytes_per_second: int | None = None
    update_bytes_per_second: int | None = None
    network_classes: int = 1
    packet_bytes: int = 30_000
    source: str = "unstated"

    def __post_init__(self) -> None:
        for field, values in (("hosts", self.hosts), ("workers", self.workers), ("servers", self.servers)):
            need(0 < len(values) <= MAX_WORKERS, field, len(values), f"1 to {MAX_WORKERS} of them")
        placed = [("workers", place, w.host) for place, w in enumerate(self.workers)]
        placed += [("servers", place, s.host) for place, s in enumerate(self.servers)]
        for kind, place, host in placed:
            need(host < len(self.hosts), f"{kind}[{place}].host", host, f"below {len(self.hosts)}")
        need_int("startup_ns", self.startup_ns, 0, MAX_NS)
        for field, rate in (
            ("sum_bytes_per_second", self.sum_bytes_per_second),
            ("update_bytes_per_second", self.update_bytes_per_second),
        ):
            if rate is not None:
                need_int(field, rate, 1, MAX_RATE)
        need_int("network_classes", self.network_classes, 1, NETWORK_CLASSES)
        need_int("packet_bytes", self.packet_bytes, 8, MAX_BYTES)
        need_name("source", self.source)

    @staticmethod
    def homogeneous(
        workers: int,
        servers: int,
        bytes_per_second: int,
        *,
        colocated: bool = False,
        startup_ns: int = 0,
        sum_bytes_per_second: int | None = None,
        network_classes: int = 1,
    ) -> Cluster:
        """Equal hosts with links of one rate each way: one process a host, or with `colocated` server i on worker i's."""
        need_int("workers", workers, 1, MAX_WORKERS)
        need_int("servers", servers, 1, MAX_WORKERS)
        need(not colocated or servers <= workers, "servers", servers, f"at most the {workers} workers whose hosts they share")
        link = Link(bytes_per_second)
        return Cluster(
            (Host(link, link),) * (workers if colocated else workers + servers),
            tuple(Worker(index) for index in range(workers)),
            tuple(Server(index if colocated else workers + index) for index in range(servers)),
            startup_ns,
            sum_bytes_per_second,
            None,
            network_classes,
        )

    @property
    def is_homogeneous(self) -> bool:
        """Whether all workers are in the same position, so that one can stand for all."""
        if len({worker.compute_percent for worker in self.workers}) > 1 or len({s.weight for s in self.servers}) > 1:
            return False
        of_workers, of_servers = [w.host for w in self.workers], [s.host for s in self.servers]
        if len(set(of_workers)) < len(of_workers) or len(set(of_servers)) < len(of_servers):
            return False
        shared = len(set(of_workers) & set(of_servers))
        if shared and not shared == len(of_workers) == len(of_servers):
            return False
        return all(len({self.hosts[index] for index in places}) == 1 for places in (of_workers, of_servers))

    @property
    def local(self) -> int:
        """The most workers that share a host with one server: a byte is at most so often not sent."""
        counts = Counter(worker.host for worker in self.workers)
        return max(counts[server.host] for server in self.servers)

    def as_network(self) -> Network:
        """Startup and rate of a lone message, pushed and pulled at once packet by packet, for policies to plan from.

        The rate is the least of: each worker's links, each server's links over what its share of all workers'
        bytes is, and where hosts have both, their links over the sum. Rates of a schedule count as at time 0.
        """
        weights = sum(server.weight for server in self.servers)
        workers_on = Counter(worker.host for worker in self.workers)
        weight_on: Counter[int] = Counter()
        for server in self.servers:
            weight_on[server.host] += server.weight
        rate = MAX_RATE
        for index, host in enumerate(self.hosts):
            # what stays on its host passes no link; the loads of a host are the same up and down
            as_worker = workers_on[index] * (weights - weight_on[index])
            as_server = weight_on[index] * (len(self.workers) - workers_on[index])
            if as_worker + as_server:
                slower = min(host.up.at(0)[0], host.down.at(0)[0])
                rate = min(rate, slower * weights // (as_worker + as_server))
        return Network.line(len(self.workers), self.startup_ns, min(max(rate, 1), MAX_RATE), source=self.source)
