"""What a lab is made of, and who runs where on it. Values only; nothing starts here.

A spec can be written to a file and read back (`lab/files.py`). Rates are those of the cluster that
is emulated; `scale` makes all of them smaller, and emulated devices' tensors too
(`gradlane.lab.emulated`).
"""

from __future__ import annotations

from collections import Counter

import msgspec

from gradlane.core.cluster import Cluster, Link, RateStep, random_steps
from gradlane.core.fields import MAX_NS, MAX_RATE, need, need_int, need_name
from gradlane.core.network import NETWORK_CLASSES
from gradlane.core.traffic_class import DSCP
from gradlane.errors import InputError

MOST_HOSTS = 64
MOST_JOBS = 16
MOST_RANKS_PER_HOST = 16
MOST_DELAY_NS = 10 * 10**9
MOST_LOSS_PPM = 999_999
MOST_SCALE = 1000

_FASTEST_LINK = 100 * 10**9
_SLOWEST_LINK = 10**6
LINK_RATES = "1mbit to 100gbit"


class HostSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A host that differs from the others.

    Attributes:
        host: its number.
        up, down: its links to and from the switch; None: as the lab's.
        compute_percent: emulated devices on this host take this many per cent of their profile's
            times.
        delay_ns, loss_ppm: of its link, in each direction; None: as the lab's.
    """

    host: int
    up: Link | None = None
    down: Link | None = None
    compute_percent: int = 100
    delay_ns: int | None = None
    loss_ppm: int | None = None

    def __post_init__(self) -> None:
        need_int("host", self.host, 0, MOST_HOSTS - 1)
        need_int("compute_percent", self.compute_percent, 1, 1_000_000)
        _need_delay_and_loss(self.delay_ns or 0, self.loss_ppm or 0)

    @staticmethod
    def varying(host: int, low: int, high: int, every_ns: int, count: int) -> HostSpec:
        """A host whose link's rates are drawn at random (`random_steps`, seeded by its number).

        Args:
            host: its number.
            low, high: bounds of the rates, in bytes per second.
            every_ns: time between changes.
            count: number of rates.
        """
        link = Link(high, random_steps(host, low, high, every_ns, count))
        return HostSpec(host, link, link)


class Flow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Other traffic: one TCP connection.

    Attributes:
        source, target: hosts.
        bytes_per_second: of payload; None: as much as TCP gets.
        start_ns, end_ns: from the start of the ranks; `end_ns` None: until the ranks have ended.
        network_class: its priority class; None: the lowest.
    """

    source: int
    target: int
    bytes_per_second: int | None = None
    start_ns: int = 0
    end_ns: int | None = None
    network_class: int | None = None

    def __post_init__(self) -> None:
        need_int("source", self.source, 0, MOST_HOSTS - 1)
        need_int("target", self.target, 0, MOST_HOSTS - 1)
        need(self.source != self.target, "target", self.target, "another host than the source")
        if self.bytes_per_second is not None:
            need_int("bytes_per_second", self.bytes_per_second, 1, MAX_RATE)
        need_int("start_ns", self.start_ns, 0, MAX_NS)
        if self.end_ns is not None:
            need_int("end_ns", self.end_ns, self.start_ns, MAX_NS)
        if self.network_class is not None:
            need_int("network_class", self.network_class, 0, NETWORK_CLASSES - 1)


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A job on the lab. Jobs may share hosts.

    Attributes:
        workers, servers: the host of each rank and of each server.
        command: what the ranks run; empty: the command that the lab is run with.
        server_command: what the servers run; empty: `gradlane server` for the job.
        environment: added to that of all its processes.
        name: for people.
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...] = ()
    command: tuple[str, ...] = ()
    server_command: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    name: str = ""

    def __post_init__(self) -> None:
        need(0 < len(self.workers) <= 1024, "workers", len(self.workers), "1 to 1024 of them")
        need(len(self.servers) <= 1024, "servers", len(self.servers), "at most 1024 of them")
        for field, hosts in (("workers", self.workers), ("servers", self.servers)):
            for host in hosts:
                need_int(field, host, 0, MOST_HOSTS - 1)
        if self.name:
            need_name("name", self.name)


class LabSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Hosts around one switch.

    Attributes:
        hosts: how many.
        ranks_per_host: how many ranks `jobs` being empty means on each host; they share its link.
        link_bits_per_second: rate of each link in each direction, Ethernet headers included; None:
            not shaped.
        queue_ns: a switch's port drops what would wait longer at its rate. A host's own queue is as
            long as Linux gives a network card.
        mtu_bytes: of every interface.
        unlike: hosts that differ from the others.
        network_classes: number of priority classes. Above 1, both ends of each link serve more
            urgent classes first; a packet's class is its DSCP's class selector (`type_of_service`).
        jobs: who runs where; empty: one job with `ranks_per_host` ranks on each host, those of a host
            in a row.
        traffic: other traffic.
        scale: multiplies every rate, and emulated devices' tensors.
        delay_ns: delay of each link in each direction; between two hosts it is twice that.
        loss_ppm: packets that each link loses, out of a million, drawn from a seed.
    """

    hosts: int
    link_bits_per_second: int | None = None
    queue_ns: int = 5_000_000
    mtu_bytes: int = 1500
    unlike: tuple[HostSpec, ...] = ()
    network_classes: int = 1
    jobs: tuple[JobSpec, ...] = ()
    traffic: tuple[Flow, ...] = ()
    scale: float = 1.0
    delay_ns: int = 0
    loss_ppm: int = 0
    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise InputError(f"lab hosts: got {self.hosts}, expected 1 to {MOST_HOSTS}")
        if not 0 < self.scale <= MOST_SCALE:
            raise InputError(f"lab scale: got {self.scale}, expected more than 0, at most {MOST_SCALE}")
        if not 100_000 <= self.queue_ns <= 1_000_000_000:
            raise InputError(f"lab queue: got {self.queue_ns} ns, expected 100 us to 1 s")
        if not 576 <= self.mtu_bytes <= 9000:
            raise InputError(f"lab MTU: got {self.mtu_bytes} bytes, expected 576 to 9000")
        need_int("network_classes", self.network_classes, 1, NETWORK_CLASSES)
        need_int("ranks_per_host", self.ranks_per_host, 1, MOST_RANKS_PER_HOST)
        if self.jobs and self.ranks_per_host != 1:
            raise InputError(
                f"lab: got jobs and {self.ranks_per_host} ranks a host, expected one of them; jobs say who runs where"
            )
        _need_delay_and_loss(self.delay_ns, self.loss_ppm)
        need(len(self.jobs) <= MOST_JOBS, "jobs", len(self.jobs), f"at most {MOST_JOBS} of them")
        counts = Counter(entry.host for entry in self.unlike)
        for host, count in counts.items():
            need(count == 1, "unlike", f"host {host} {count} times", "each host once")
        named = [("unlike", entry.host) for entry in self.unlike]
        named += [("jobs", host) for job in self.jobs for host in (*job.workers, *job.servers)]
        named += [("traffic", host) for flow in self.traffic for host in (flow.source, flow.target)]
        for field, host in named:
            need(host < self.hosts, field, host, f"a host from 0 to {self.hosts - 1}")
        for host in range(self.hosts):
            for link in self.links(host):
                for rate in () if link is None else (link.bytes_per_second, *(step.bytes_per_second for step in link.steps)):
                    if not is_link_rate(rate):
                        scaled = "" if self.scale == 1 else f" (x {self.scale:g})"
                        raise InputError(
                            f"lab link: got {rate * 8} bit/s{scaled}, expected {LINK_RATES}, or none for an unshaped link"
                        )

    @staticmethod
    def of_cluster(cluster: Cluster, *, scale: float = 1.0, queue_ns: int = 5_000_000, mtu_bytes: int = 1500) -> LabSpec:
        """The lab of a simulated cluster: its hosts, links, slow workers and classes, and one job
        on them.

        What a lab cannot set stays as it is on this machine: startup, summing and updating rates,
        packet size.
        """
        percents: dict[int, int] = {}
        for worker in cluster.workers:
            if percents.setdefault(worker.host, worker.compute_percent) != worker.compute_percent:
                raise InputError(f"lab: got workers of two speeds on host {worker.host}, expected one speed a host")
        weights = {server.weight for server in cluster.servers}
        if len(weights) > 1:
            raise InputError(
                f"lab: got servers of weights {sorted(weights)}, expected equal ones; a lab's servers share evenly"
            )
        return LabSpec(
            len(cluster.hosts),
            unlike=tuple(
                HostSpec(place, host.up, host.down, percents.get(place, 100)) for place, host in enumerate(cluster.hosts)
            ),
            network_classes=cluster.network_classes,
            jobs=(JobSpec(tuple(w.host for w in cluster.workers), tuple(s.host for s in cluster.servers)),),
            scale=scale,
            queue_ns=queue_ns,
            mtu_bytes=mtu_bytes,
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address of each host."""
        return tuple(f"10.77.0.{host + 1}" for host in range(self.hosts))

    @property
    def all_jobs(self) -> tuple[JobSpec, ...]:
        return self.jobs or (JobSpec(ranks_on(self.hosts, self.ranks_per_host)),)

    def links(self, host: int) -> tuple[Link | None, Link | None]:
        """A host's links to and from the switch with `scale` applied; None: not shaped."""
        rate = self.link_bits_per_second
        usual = None if rate is None else Link(max(rate // 8, 1))
        own = self._own(host)
        return self._scaled(own.up or usual), self._scaled(own.down or usual)

    def delay_and_loss(self, host: int) -> tuple[int, int]:
        """Delay in ns and loss in packets out of a million of a host's link, in each direction."""
        own = self._own(host)
        delay_ns = self.delay_ns if own.delay_ns is None else own.delay_ns
        return delay_ns, self.loss_ppm if own.loss_ppm is None else own.loss_ppm

    def compute_percent(self, host: int) -> int:
        return self._own(host).compute_percent

    def _own(self, host: int) -> HostSpec:
        return next((entry for entry in self.unlike if entry.host == host), HostSpec(host))

    @property
    def is_shaped(self) -> bool:
        return any(link is not None for host in range(self.hosts) for link in self.links(host))

    def _scaled(self, link: Link | None) -> Link | None:
        if link is None or self.scale == 1:
            return link
        steps = tuple(RateStep(step.at_ns, max(round(step.bytes_per_second * self.scale), 1)) for step in link.steps)
        return Link(max(round(link.bytes_per_second * self.scale), 1), steps)


def is_link_rate(bytes_per_second: int) -> bool:
    """Whether the kernel can shape a link to this rate, to which the lab's scale has been applied."""
    return _SLOWEST_LINK <= bytes_per_second * 8 <= _FASTEST_LINK


def ranks_on(hosts: int, ranks_per_host: int) -> tuple[int, ...]:
    """The host of each rank, where each host has as many and those of a host are in a row."""
    return tuple(host for host in range(hosts) for _ in range(ranks_per_host))


def _need_delay_and_loss(delay_ns: int, loss_ppm: int) -> None:
    need_int("delay_ns", delay_ns, 0, MOST_DELAY_NS)
    need_int("loss_ppm", loss_ppm, 0, MOST_LOSS_PPM)


def type_of_service(network_class: int) -> int:
    """The IP_TOS byte for a class, 0 the most urgent: EF, AF41, AF31, AF21, AF11, unmarked."""
    return DSCP[network_class] << 2


def class_of(precedence: int, network_classes: int) -> int:
    """The class of packets whose DSCP starts with these 3 bits; unmarked ones have the last class."""
    return network_classes - 1 if precedence == 0 else min(max(5 - precedence, 0), network_classes - 1)
