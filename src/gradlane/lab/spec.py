"""What a lab is made of and who runs where on it. Values only; nothing is started here.

A spec is data: it can be written to a file and read back (`lab/files.py`). Rates are the ones of the cluster that is
meant; `scale` makes all of them smaller together, and emulated devices their tensors (`gradlane.lab.emulated`).
"""

from __future__ import annotations

from collections import Counter

import msgspec

from gradlane.core.cluster import NETWORK_CLASSES, Cluster, Link, RateStep, random_steps
from gradlane.core.fields import MAX_NS, need, need_int, need_name
from gradlane.core.network import MAX_RATE
from gradlane.core.traffic_class import DSCP
from gradlane.errors import InputError

MOST_HOSTS = 64
MOST_JOBS = 16

_FASTEST_LINK = 100 * 10**9
_SLOWEST_LINK = 10**6


class HostSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A host that is unlike the others: its link up to the switch, down from it, and how slow its device is.

    None: as the lab's links; so with what the link does to packets, see `LabSpec`. `compute_percent` reaches emulated devices
    on that host, which take so many hundredths of their profile's times.
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
        """A host whose link has rates drawn from `low` to `high` bytes per second, as `random_steps` does for its number."""
        link = Link(high, random_steps(host, low, high, every_ns, count))
        return HostSpec(host, link, link)


class Flow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Other traffic: one TCP connection from a host to another, from `start_ns` after the ranks' start until `end_ns`.

    `bytes_per_second` is of its payload, None for as much as TCP gets; `end_ns` None: until the ranks have ended.
    `network_class`: its priority class, None for the least.
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
    """A job on the lab: the host of each of its ranks and of each of its servers, and what they run.

    No `command`: the one that the lab is run with. No `server_command`: `gradlane server`, meeting the job's ranks.
    `environment` is added to that of all of its processes. Jobs may share hosts.
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

    A link is shaped to `link_bits_per_second` in each direction by itself (Ethernet headers count, as on a real port); None
    leaves links as fast as the processor. A switch's port drops what would wait longer than `queue_ns` at its rate; a host's
    own end has a queue as long as Linux gives a network card. Hosts in `unlike` have links of their own. With
    `network_classes` above 1, both ends of each link serve a packet of a more urgent class before any of a less urgent
    one; a packet's class is its DSCP's class selector (`type_of_service`).

    Each link delays packets by `delay_ns` in each direction, so that from host to host it is twice that, and loses so many of a
    million as `loss_ppm` says, drawn from a seed.

    No `jobs`: one job, a rank on each host. scale: of every rate; in a lab, of emulated devices' tensors too.
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

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise InputError(f"lab hosts: got {self.hosts}, expected 1 to {MOST_HOSTS}")
        if not 0 < self.scale <= 1000:
            raise InputError(f"lab scale: got {self.scale}, expected more than 0, at most 1000")
        if not 100_000 <= self.queue_ns <= 1_000_000_000:
            raise InputError(f"lab queue: got {self.queue_ns} ns, expected 100 us to 1 s")
        if not 576 <= self.mtu_bytes <= 9000:
            raise InputError(f"lab MTU: got {self.mtu_bytes} bytes, expected 576 to 9000")
        need_int("network_classes", self.network_classes, 1, NETWORK_CLASSES)
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
                    if not _SLOWEST_LINK <= rate * 8 <= _FASTEST_LINK:
                        scaled = "" if self.scale == 1 else f" (x {self.scale:g})"
                        raise InputError(
                            f"lab link: got {rate * 8} bit/s{scaled}, expected 1mbit to 100gbit, or none for an unshaped link"
                        )

    @staticmethod
    def of_cluster(cluster: Cluster, *, scale: float = 1.0, queue_ns: int = 5_000_000, mtu_bytes: int = 1500) -> LabSpec:
        """The lab of a simulated cluster: its hosts, links, slow workers, classes, and one job on its workers and servers.

        What a lab cannot set stays as it is on this machine: startup, rates of summing and updating, the packets' size.
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
        return self.jobs or (JobSpec(tuple(range(self.hosts))),)

    def links(self, host: int) -> tuple[Link | None, Link | None]:
        """The links of a host up to the switch and down from it, as the lab makes them: with `scale`. None: unshaped."""
        rate = self.link_bits_per_second
        usual = None if rate is None else Link(max(rate // 8, 1))
        own = self._own(host)
        return self._scaled(own.up or usual), self._scaled(own.down or usual)

    def delay_and_loss(self, host: int) -> tuple[int, int]:
        """What a host's link does to packets in each direction: delays them, in ns, and loses so many of a million."""
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


def _need_delay_and_loss(delay_ns: int, loss_ppm: int) -> None:
    need_int("delay_ns", delay_ns, 0, 10 * 10**9)
    need_int("loss_ppm", loss_ppm, 0, 999_999)


def type_of_service(network_class: int) -> int:
    """The byte for IP_TOS that puts a packet into a class, 0 the most urgent: EF, AF41, AF31, AF21, AF11, unmarked."""
    return DSCP[network_class] << 2


def class_of(precedence: int, network_classes: int) -> int:
    """The class of packets whose DSCP begins with these three bits; what is not marked is of the last one."""
    return network_classes - 1 if precedence == 0 else min(max(5 - precedence, 0), network_classes - 1)
