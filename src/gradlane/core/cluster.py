"""Cluster: workers and parameter servers on hosts, each host with an uplink and a downlink.

A `Network` gives the cost of one collective. A cluster gives the links that a message's bytes pass
on the way to the servers and back. Of a host with several workers, each sends its own messages; or,
where the cluster has a `Bus`, they are summed on the host first. `as_network` reduces a cluster to
the startup and rate that policies plan with.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_right
from collections import Counter

import msgspec
from msgspec import UNSET, UnsetType

from gradlane.core.bus import Bus
from gradlane.core.fields import MAX_BYTES, MAX_NS, MAX_RATE, need, need_int, need_name
from gradlane.core.network import MAX_WORKERS, NETWORK_CLASSES, Network, staged
from gradlane.units import NS_PER_SECOND

MAX_STEPS = 1_000_000


class RateStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """From `at_ns` on, a link carries `bytes_per_second`."""

    at_ns: int
    bytes_per_second: int

    def __post_init__(self) -> None:
        need_int("at_ns", self.at_ns, 0, MAX_NS)
        need_int("bytes_per_second", self.bytes_per_second, 1, MAX_RATE)


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One direction between a host and the switch.

    Attributes:
        bytes_per_second: the rate from time 0.
        steps: changes of the rate, in ascending order of time.
    """

    bytes_per_second: int
    steps: tuple[RateStep, ...] = ()

    def __post_init__(self) -> None:
        need_int("bytes_per_second", self.bytes_per_second, 1, MAX_RATE)
        need(len(self.steps) <= MAX_STEPS, "steps", len(self.steps), f"at most {MAX_STEPS} of them")
        for before, after in itertools.pairwise(self.steps):
            need(before.at_ns < after.at_ns, "steps", after.at_ns, f"a time after the {before.at_ns} before it")

    def at(self, now_ns: int) -> tuple[int, int | None]:
        """The link's rate at a time.

        Returns:
            The rate at `now_ns` in bytes per second, and the time in ns of its next change (None:
            never).
        """
        place = bisect_right(self.steps, now_ns, key=lambda step: step.at_ns)
        rate = self.steps[place - 1].bytes_per_second if place else self.bytes_per_second
        return rate, self.steps[place].at_ns if place < len(self.steps) else None

    def finish_ns(self, start_ns: int, size_bytes: int) -> int:
        """When `size_bytes` that start at `start_ns` have passed, alone on the link; in ns, rounded
        up.
        """
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

    def carried_bytes(self, start_ns: int, end_ns: int) -> int:
        """How many bytes pass from `start_ns` to `end_ns`, rounded down: the inverse of `finish_ns`."""
        carried = 0
        while start_ns < end_ns:
            rate, changes_ns = self.at(start_ns)
            until_ns = end_ns if changes_ns is None else min(end_ns, changes_ns)
            carried += rate * (until_ns - start_ns)
            start_ns = until_ns
        return carried // NS_PER_SECOND

    @property
    def fastest(self) -> int:
        """The highest rate that the link ever has, in bytes per second."""
        return max(self.bytes_per_second, max((step.bytes_per_second for step in self.steps), default=0))


def random_steps(seed: int, low: int, high: int, every_ns: int, count: int) -> tuple[RateStep, ...]:
    """Random changes of a link's rate, as Mercury Figs. 18 and 19 have them for servers.

    Args:
        seed: the same seed gives the same steps.
        low, high: bounds of the uniform distribution that rates are drawn from, in bytes per
            second.
        every_ns: time between two steps; the first is at 0.
        count: number of steps.

    Raises:
        InputError: an argument is out of its range.
    """
    need_int("count", count, 1, MAX_STEPS)
    need_int("every_ns", every_ns, 1, MAX_NS)
    need(0 < low <= high, "low", low, f"from 1 to {high}")
    draw = random.Random(seed)
    return tuple(RateStep(index * every_ns, draw.randint(low, high)) for index in range(count))


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine with one link to the switch and one from it. Several workers may run on it."""

    up: Link
    down: Link


class Worker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A worker on a host.

    Attributes:
        host: index into `Cluster.hosts`.
        compute_percent: its compute times, in per cent of the profile's.
    """

    host: int
    compute_percent: int = 100

    def __post_init__(self) -> None:
        need_int("host", self.host, 0, MAX_WORKERS)
        need_int("compute_percent", self.compute_percent, 1, 1_000_000)


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A parameter server on a host.

    Attributes:
        host: index into `Cluster.hosts`.
        weight: the server holds `weight` / (sum of all weights) of the bytes.
    """

    host: int
    weight: int = 1

    def __post_init__(self) -> None:
        need_int("host", self.host, 0, MAX_WORKERS)
        need_int("weight", self.weight, 1, 1_000_000)


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workers, parameter servers and the hosts they run on.

    Attributes:
        startup_ns: time that a sender spends on each message before its bytes go, one message after
            another (Mercury §III). A server's acknowledgement takes as long to be heard.
        sum_bytes_per_second: rate at which a server adds a worker's bytes (None: adding takes no
            time).
        update_bytes_per_second: rate at which a server updates parameters. None: the workers
            update, in the profile's times.
        network_classes: number of priority classes of every link, 1 to 8. Lanes of lower priority
            than the last class share it; with 1 all lanes do.
        packet_bytes: the largest unit that a link serves without a pause.
        packet_startup_ns: time that a host spends on each packet before the packet's bytes pass its uplink, one packet after
            another (Mercury Fig. 17). UNSET, and left out of files: a packet costs its bytes alone.
        source: where the numbers come from.
        bus: the workers of a host are devices that sum a message first, and the host sends the sum
            as one; each worker's host has `Bus.devices` of them. UNSET, and left out of files: each
            worker sends its own.
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
    bus: Bus | UnsetType = UNSET
    packet_startup_ns: int | UnsetType = UNSET

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
        if self.packet_startup_ns is not UNSET:
            need_int("packet_startup_ns", self.packet_startup_ns, 1, MAX_NS)
        if self.bus is not UNSET:
            for host, count in Counter(worker.host for worker in self.workers).items():
                need(count == self.bus.devices, "workers", count, f"the {self.bus.devices} of the bus on host {host}")

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
        devices: int = 1,
        bus: Bus | UnsetType = UNSET,
    ) -> Cluster:
        """Equal hosts whose links have one rate in both directions.

        Args:
            workers, servers: how many of each.
            bytes_per_second: rate of every link.
            colocated: server i runs on the i-th of the workers' hosts; otherwise every server has a
                host of its own.
            startup_ns, sum_bytes_per_second, network_classes, bus: as the fields of `Cluster`.
            devices: workers on each host.

        Raises:
            InputError: an argument is out of its range, there are more colocated servers than
                workers' hosts, or hosts would have different numbers of workers.
        """
        need_int("workers", workers, 1, MAX_WORKERS)
        need_int("servers", servers, 1, MAX_WORKERS)
        need_int("devices", devices, 1, workers)
        need(workers % devices == 0, "workers", workers, f"a multiple of the {devices} devices of a host")
        hosts = workers // devices
        beside = f"at most {MAX_WORKERS - hosts}, as many hosts as there may be beside the {hosts} of workers"
        need(colocated or hosts + servers <= MAX_WORKERS, "servers", servers, beside)
        need(not colocated or servers <= hosts, "servers", servers, f"at most the {hosts} hosts of workers which they share")
        link = Link(bytes_per_second)
        return Cluster(
            (Host(link, link),) * (hosts if colocated else hosts + servers),
            tuple(Worker(index // devices) for index in range(workers)),
            tuple(Server(index if colocated else hosts + index) for index in range(servers)),
            startup_ns,
            sum_bytes_per_second,
            None,
            network_classes,
            bus=bus,
        )

    @property
    def between(self) -> Cluster:
        """What goes between hosts: without the bus, and with one worker for all devices of a host."""
        if self.bus is UNSET:
            return self
        hosts = dict.fromkeys(worker.host for worker in self.workers)
        return msgspec.structs.replace(self, workers=tuple(Worker(host) for host in hosts), bus=UNSET)

    @property
    def is_homogeneous(self) -> bool:
        """Whether all workers have the same position, so that the simulation of one gives all."""
        if len({worker.compute_percent for worker in self.workers}) > 1 or len({s.weight for s in self.servers}) > 1:
            return False
        workers_on, of_servers = Counter(w.host for w in self.workers), [s.host for s in self.servers]
        if len(set(workers_on.values())) > 1 or len(set(of_servers)) < len(of_servers):
            return False
        of_workers = list(workers_on)
        shared = len(set(of_workers) & set(of_servers))
        if shared and not shared == len(of_workers) == len(of_servers):
            return False
        return all(len({self.hosts[index] for index in places}) == 1 for places in (of_workers, of_servers))

    def _with_startups(self, bytes_per_second: int) -> int:
        """The bytes per second of whole packets that a link of this rate carries, each after its startup."""
        if self.packet_startup_ns is UNSET:
            return bytes_per_second
        in_startup = self.packet_startup_ns * bytes_per_second  # bytes, times 10^9
        whole = self.packet_bytes * NS_PER_SECOND
        return max(1, bytes_per_second * whole // (whole + in_startup))

    def as_network(self) -> Network:
        """The startup and rate that policies plan with: a lone message's, pushed and pulled packet
        by packet.

        The rate is the minimum over hosts of link rate / (what the host's processes send of each
        message, in messages). A worker sends a whole message, less what servers on its host hold. A server sends its
        share to every worker on another host. A host with both sends the sum. If a host without workers is the
        slowest, `own_link` says by how much. Links with steps count with their rate at time 0, and a packet's startup as
        bytes of its link. With a bus, it is
        the whole path's as `Network.path` has it.
        """
        if self.bus is not UNSET:
            stage = self.bus.broadcast
            between = msgspec.structs.replace(self.between.as_network(), workers=len(self.workers))
            return staged(between, stage, stage, self.bus.packet_bytes)
        weights = sum(server.weight for server in self.servers)
        workers_on = Counter(worker.host for worker in self.workers)
        weight_on: Counter[int] = Counter()
        for server in self.servers:
            weight_on[server.host] += server.weight
        rate = of_workers = MAX_RATE
        for index, host in enumerate(self.hosts):
            # what stays on its host passes no link; the loads of a host are the same up and down
            as_worker = workers_on[index] * (weights - weight_on[index])
            as_server = weight_on[index] * (len(self.workers) - workers_on[index])
            if as_worker + as_server:
                slower = min(self._with_startups(host.up.at(0)[0]), host.down.at(0)[0])
                host_rate = max(1, slower * weights // (as_worker + as_server))
                rate = min(rate, host_rate)
                of_workers = min(of_workers, host_rate) if workers_on[index] else of_workers
        network = Network.line(len(self.workers), self.startup_ns, rate, source=self.source)
        return network if rate == of_workers else msgspec.structs.replace(network, own_link=of_workers / rate)
