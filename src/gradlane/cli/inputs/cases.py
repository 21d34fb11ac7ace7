"""Cases on the command line: networks by file or by options, with the profiles that cross them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import click
import msgspec
from msgspec import UNSET, UnsetType

from gradlane import zoo
from gradlane.cli.inputs.faults import naming
from gradlane.cli.inputs.types import Choice, parse_time, whole_number
from gradlane.core.bus import MAX_DEVICES, Bus
from gradlane.core.cluster import Cluster
from gradlane.core.collectives import ALGORITHMS, all_reduce, flat_ring
from gradlane.core.fields import did_you_mean
from gradlane.core.nccl import LATEST, TABLES, nccl
from gradlane.core.network import MAX_WORKERS, NETWORK_CLASSES, Network
from gradlane.core.profile import Profile
from gradlane.errors import InputError
from gradlane.planning.questions import Case
from gradlane.planning.questions.jitter import slowdown
from gradlane.planning.questions.sweep import Where
from gradlane.units import MAX_RATE, NS_PER_SECOND, counted, format_bytes, format_ns, format_rate, parse_rate
from gradlane.zoo.buses import BUSES

AS_MANY = "same"
PLACE_OPTIONS = ("algorithm", "startup", "servers", "colocated", "bus", "bus_startup", "flat", "crossings")
RATES, WORKERS, STARTUP, BUS, BUS_STARTUP = "10gbit", "8", "30us", "pcie3", "5us"  # defaults
AUTO, RING = "auto", "ring"
MOST_STARTUP_NS = 100 * NS_PER_SECOND  # for any number of steps of an all-reduce


class Workers(NamedTuple):
    """The value of --workers: hosts, and devices of each host; each device is a worker."""

    hosts: int
    devices: int = 1

    @property
    def total(self) -> int:
        return self.hosts * self.devices

    def __str__(self) -> str:
        return f"{self.hosts}" if self.devices == 1 else f"{self.hosts}x{self.devices}"


def place_options(command: Callable[..., Any], *, rates: str = RATES, workers: str = WORKERS) -> Callable[..., Any]:
    """Add the options that describe networks.

    The command takes them, except --rate and --workers, as keywords for `read_place`: `PLACE_OPTIONS`.

    Args:
        command: gets the options.
        rates: the default of --rate, for the help; empty hides --rate.
        workers: the default of --workers, for the help.
    """
    for option in (
        click.option(
            "--crossings",
            type=whole_number(1, MAX_DEVICES),
            help="How often the ring of --flat leaves each host, 1 to its devices.  [default: 1]",
        ),
        click.option(
            "--flat",
            is_flag=True,
            help="No sums within hosts: one ring through all devices, or each device sends its own to the servers.",
        ),
        click.option(
            "--bus-startup",
            metavar="TIME",
            help=f"Of a transfer between devices of a host.  [default: the bus's; with a rate {BUS_STARTUP}]",
        ),
        click.option(
            "--bus",
            metavar="NAME|RATE",
            help=f"Between devices of a host: {', '.join(BUSES)}, or a rate.  [default: {BUS}]",
        ),
        click.option(
            "--algorithm",
            type=Choice([AUTO, *TABLES, *ALGORITHMS]),
            help=(
                "Of the all-reduce. auto: what NCCL would choose for each message, by its latest table here. The others are of "
                "MG-WFBP's Table 2, between hosts whose devices sum first.  [default: auto for hosts of several GPUs, else "
                "ring]"
            ),
        ),
        click.option(
            "--startup",
            metavar="TIME",
            help=(
                "Of a transfer between two hosts, or of a message to servers; with auto what it takes beyond NCCL's table.  "
                f"[default: {STARTUP}, with auto 0us]"
            ),
        ),
        click.option("--colocated", is_flag=True, help="Servers on the workers' hosts rather than on their own."),
        click.option(
            "--servers", metavar="M", help="M parameter servers instead of all-reduce; `same`: as many as hosts of workers."
        ),
        click.option(
            "--workers",
            multiple=True,
            metavar="N|HxD",
            help=f"Workers: 8, or 2,4,8, or 2..64 by doubling; of hosts with 8 devices: 16x8.  [default: {workers}]",
        ),
        click.option(
            "--rate",
            multiple=True,
            metavar="RATE",
            help=f"Of each host's link, each way: 10gbit, or 1gbit,10gbit, or cards: ndr, 8xndr.  [default: {rates}]",
            hidden=not rates,
        ),
    ):
        command = option(command)
    return command


@dataclass(frozen=True)
class Place:
    """Everything about a network but its rate and its number of workers.

    Attributes:
        algorithm: as given; None for the default (`algorithm_of`).
        startup_ns: as given; None for the default.
        bus: of hosts with two devices; those with more have the same.
        nvlink, nvswitch_sums: as `zoo.buses.BusSpec` has them.
        flat: whether devices of a host do not sum among themselves first.
        crossings: if they do not, how often the ring through all devices leaves each host.
        of_hosts: the first option given that only hosts with several devices have; None if none is.
        has_nccl: whether NCCL is there to choose.
    """

    algorithm: str | None
    startup_ns: int | None
    servers: str | None
    colocated: bool
    bus: Bus
    nvlink: bool
    nvswitch_sums: bool
    flat: bool
    crossings: int
    of_hosts: str | None
    has_nccl: bool = True

    def at(self, bits_per_second: int, workers: Workers) -> Where:
        """The network of `workers` on links of this rate."""
        rate = max(1, bits_per_second // 8)
        startup_ns = parse_time("--startup", STARTUP) if self.startup_ns is None else self.startup_ns
        bus: Bus | UnsetType = UNSET
        if workers.devices > 1:
            bus = msgspec.structs.replace(self.bus, devices=workers.devices)
        if self.servers is not None:
            servers = workers.hosts if self.servers == AS_MANY else int(self.servers)
            with naming("--servers"):
                return Cluster.homogeneous(
                    workers.total, servers, rate, colocated=self.colocated, startup_ns=startup_ns,
                    network_classes=NETWORK_CLASSES, devices=workers.devices, bus=UNSET if self.flat else bus,
                )  # fmt: skip
        if self.flat and bus is not UNSET:
            return flat_ring(workers.hosts, bus, startup_ns=startup_ns, bytes_per_second=rate, crossings=self.crossings)
        algorithm = self.algorithm_of(workers)
        if algorithm == AUTO or algorithm in TABLES:
            return nccl(
                workers.hosts, None if bus is UNSET else bus, bytes_per_second=rate, added_ns=self.startup_ns or 0,
                nvlink=self.nvlink, nvswitch_sums=self.nvswitch_sums, table=LATEST if algorithm == AUTO else algorithm,
            )  # fmt: skip
        between = all_reduce(algorithm, workers.hosts, startup_ns=startup_ns, bytes_per_second=rate)
        return msgspec.structs.replace(between, workers=workers.total, bus=bus)

    def algorithm_of(self, workers: Workers) -> str:
        """The all-reduce of `workers`.

        Hosts of several devices have GPUs on a bus, which NCCL serves. Where each worker is a host, a ring is what Gloo
        and gradlane's own transport send. TPUs are assumed to have rings, too.
        """
        if self.algorithm is not None:
            return self.algorithm
        return AUTO if workers.devices > 1 and not self.flat and self.has_nccl else RING

    def with_bus_times(self, times: float) -> Place:
        """The same place with a bus of `times` the rate."""
        return replace(self, bus=msgspec.structs.replace(self.bus, bytes_per_second=round(self.bus.bytes_per_second * times)))


def read_place(
    algorithm: str | None,
    startup: str | None,
    servers: str | None,
    colocated: bool,
    bus: str | None = None,
    bus_startup: str | None = None,
    flat: bool = False,
    crossings: int | None = None,
    *,
    device: str | None = None,
) -> Place:
    """The place that the options of `place_options` describe, with the devices that `--device` names.

    Raises:
        InputError: an option is not usable; the message names it.
    """
    has_nccl = device not in zoo.DEVICES or zoo.DEVICES[device].has_nccl
    if not has_nccl and (algorithm == AUTO or algorithm in TABLES):
        raise InputError(f"--algorithm: got {algorithm} with --device {device}, which has no NCCL; expected ring, or none")
    if servers is not None and servers != AS_MANY and not re.fullmatch(r"[1-9]\d{0,6}", servers):
        raise InputError(f"--servers: got {servers!r}, expected a number of them, or {AS_MANY}")
    if servers is not None and algorithm is not None:
        raise InputError(f"--algorithm: got {algorithm} with --servers, expected one or the other; servers need no all-reduce")
    if colocated and servers is None:
        raise InputError("--colocated: got it without --servers, expected a number of servers too")
    if crossings is not None and (not flat or servers is not None):
        raise InputError("--crossings: got it without a ring through all devices, expected --flat, and no --servers")
    if flat and servers is None and algorithm not in (None, RING):
        raise InputError(f"--flat: got it with --algorithm {algorithm}, expected ring, or no --flat")
    of_bus = "--bus" if bus is not None else "--bus-startup" if bus_startup is not None else None
    if of_bus is not None and flat and servers is not None:
        raise InputError(f"{of_bus}: got it with --flat and --servers, where nothing is summed over the bus; expected none")
    spec = BUSES.get(bus or BUS)
    return Place(
        algorithm, None if startup is None else parse_time("--startup", startup, MOST_STARTUP_NS), servers, colocated,
        _read_bus(bus or BUS, bus_startup),
        spec is not None and spec.nvlink, spec is not None and spec.nvswitch_sums, flat, crossings or 1,
        of_bus or ("--flat" if flat else None),
        has_nccl,
    )  # fmt: skip


def need_no_place(given: dict[str, Any]) -> None:
    """Refuse options of `place_options` beside a network's file, which describes the whole place.

    Args:
        given: the command's keywords; an empty one stands for an option that was not given.

    Raises:
        InputError: an option is given; the message names the first.
    """
    for name in ("rate", "workers", *PLACE_OPTIONS):
        if given[name]:
            raise InputError(f"--{name.replace('_', '-')}: got it with a network's file, expected one or the other")


def _read_bus(text: str, startup: str | None) -> Bus:
    startup_ns = parse_time("--bus-startup", startup or BUS_STARTUP, MOST_STARTUP_NS)
    with naming("--bus"):
        if text[:1].isdigit():
            return Bus(2, startup_ns, max(1, parse_rate(text) // 8), source="--bus")
        found = zoo.bus(text, 2)
    return found if startup is None else msgspec.structs.replace(found, startup_ns=startup_ns)


def cases(
    profiles: Sequence[Profile],
    where: Place,
    rates: Sequence[int],
    workers: Sequence[Workers],
    jitter: float = 0.0,
    clips: float | None = None,
    names: Sequence[str] | None = None,
) -> list[Case]:
    """Make a case for each profile, rate (bits per second) and number of workers, in this order.

    Args:
        profiles, where, rates, workers: what is combined.
        jitter: standard deviation of a device's step, as a part of it; each step waits for the slowest device.
        clips: as in `Case`.
        names: of the profiles in the cases' labels; None for those of their models.

    Raises:
        InputError: an option is given that is of use only where hosts have several devices.
    """
    if where.of_hosts is not None and all(each.devices == 1 for each in workers):
        raise InputError(f"{where.of_hosts}: got it with one device a host, expected several, as in --workers 16x8")
    if where.flat and where.of_hosts != "--flat" and all(each.devices == where.crossings for each in workers):
        raise InputError(
            f"{where.of_hosts}: got it with --crossings {where.crossings}, as many as a host has devices, expected none: "
            "nothing is sent within hosts"
        )
    return [
        Case(
            profile.stretched(slowdown(each.total, jitter)) if jitter else profile,
            where.at(rate, each),
            {
                "model": name,
                "bits_per_second": rate,
                "workers": each.total,
                "hosts": each.hosts,
                "devices": each.devices,
            },
            alone=profile if jitter else None,
            clips=clips,
        )
        for profile, name in zip(profiles, names or [profile.model for profile in profiles], strict=True)
        for rate in rates
        for each in workers
    ]


def workers_of(case: Case) -> Workers:
    """The workers that a case of `cases` has."""
    return Workers(int(case.labels["hosts"]), int(case.labels["devices"]))


def parse_rates(texts: Sequence[str], default: str = RATES) -> list[int]:
    """The values of --rate, each once, in bits per second: 10gbit, a name of `zoo.LINKS`, or several cards, as 8xndr.

    Raises:
        InputError: a text is none of these; the message lists the names.
    """
    parts = (part.strip() for text in texts or (default,) for part in text.split(","))
    return list(dict.fromkeys(map(_parse_rate, parts)))


def _parse_rate(text: str) -> int:
    match = re.fullmatch(r"(?:([1-9]\d{0,2})x)?(.*)", text, re.DOTALL)
    assert match is not None
    count, card = int(match[1] or 1), match[2]
    if card in zoo.LINKS:
        return count * zoo.LINKS[card].bits_per_second
    if card[:1].isdigit():
        with naming("--rate"):
            rate = count * parse_rate(card)
        if rate > 8 * MAX_RATE:
            raise InputError(f"--rate: got {text!r}, expected at most {format_rate(MAX_RATE)}")
        if rate < 8:  # rates of a network are in whole bytes
            raise InputError(f"--rate: got {text!r}, expected 8bit or more")
        return rate
    raise InputError(
        f"--rate: got {text!r}{did_you_mean(card, zoo.LINKS)}, expected a rate such as 10gbit, or one of "
        f"{', '.join(zoo.LINKS)}; several cards of a host as 8xndr"
    )


def parse_workers(texts: Sequence[str], default: str = WORKERS) -> list[Workers]:
    """The values of --workers, each once: 8, or 2,4,8, or 2..64 by doubling; of hosts with devices 16x8, or
    1x8..256x8 by doubling the hosts.

    Raises:
        InputError: a text is none of these, or a number is not above zero.
    """
    found: list[Workers] = []
    for part in (part.strip() for text in texts or (default,) for part in text.split(",")):
        match = re.fullmatch(r"(\d{1,7})(?:x(\d{1,4}))?(?:\.\.(\d{1,7})(?:x(\d{1,4}))?)?", part)
        if match is None:
            raise InputError(
                f"--workers: got {part!r}, expected a number, hosts x devices as in 16x8, or a range such as 2..64"
            )
        low, devices = int(match[1]), int(match[2] or 1)
        high, as_many = int(match[3] or low), int(match[4] or (1 if match[3] else devices))
        if as_many != devices or not 1 <= devices <= MAX_DEVICES:
            raise InputError(f"--workers: got {part!r}, expected 1 to {MAX_DEVICES} devices, as many on all hosts: 2x8..64x8")
        if not 1 <= low <= high <= MAX_WORKERS // devices:
            raise InputError(f"--workers: got {part!r}, expected 1 to {MAX_WORKERS // devices}, the smaller first")
        found += [Workers(hosts, devices) for hosts in _doubling(low, high)]
    return list(dict.fromkeys(found))


def parse_counts(option: str, texts: Sequence[str], least: int = 1) -> list[int]:
    """The whole numbers that an option lists: 8, or 2,4,8, or 2..64 by doubling.

    Raises:
        InputError: a text is none of these, or a number is below `least`; the message names `option`.
    """
    counts: list[int] = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        match = re.fullmatch(r"(\d{1,7})(?:\.\.(\d{1,7}))?", part)
        if match is None:
            raise InputError(f"{option}: got {part!r}, expected a number, or a range such as 2..64")
        low, high = int(match[1]), int(match[2] or match[1])
        if not least <= low <= high <= MAX_WORKERS:
            raise InputError(f"{option}: got {part!r}, expected {least} to {MAX_WORKERS}, the smaller first")
        counts += _doubling(low, high)
    return counts


def _doubling(low: int, high: int) -> Iterator[int]:
    while low <= high:
        yield low
        low *= 2


def describe(case: Case) -> str:
    """One line for people: the model, and the network that its gradients cross."""
    profile = case.profile
    size = f"{counted(len(profile.tensors), 'tensors')}, {format_bytes(profile.size_bytes)}"
    return f"{profile.model}, {size}, {_describe_where(case)}"


def describe_at_length(case: Case) -> tuple[str, str]:
    """What is assumed, in two lines for people: the model on its device, and the network that its gradients cross."""
    profile = case.profile
    return (
        f"model    {profile.model} on {profile.device} ({profile.source.removeprefix('gradlane ')}); "
        f"{counted(len(profile.tensors), 'tensors')}, {format_bytes(profile.size_bytes)} of gradients a step",
        f"network  {_describe_where(case)}{'' if case.is_alone else _links(case)}",
    )


def _links(case: Case) -> str:
    bits = case.labels.get("bits_per_second")
    return f" (links of {format_rate(int(bits) // 8)})" if bits and isinstance(case.where, Network) else ""


def _describe_where(case: Case) -> str:
    if case.is_alone:
        return "one worker, which sends nothing"
    where = case.where
    within = "" if where.bus is UNSET else f", {where.bus.devices} devices a host on {format_rate(where.bus.bytes_per_second)}"
    if isinstance(where, Network):
        least, chosen = where.path.segments[0].startup_ns, where.algorithm in TABLES
        costs = f"{format_ns(least)} to {format_ns(where.startup_ns)}" if chosen else message_cost(where)
        return (
            f"all-reduce of {counted(where.workers, 'workers')}: a message costs {costs} and travels at "
            f"{'up to ' if chosen else ''}{format_rate(where.bytes_per_second)}{within}"
            f"{f' ({where.source})' if chosen else ''}"
        )
    return (
        f"{counted(len(where.workers), 'workers')} and {counted(len(where.servers), 'servers')} on "
        f"{counted(len(where.hosts), 'hosts')}: a message costs {format_ns(where.startup_ns)}, links of {_rates(where)}{within}"
    )


def message_cost(network: Network) -> str:
    """What a message costs beside its bytes, for people."""
    startup_ns, least_ns = network.path.segments[-1].startup_ns, network.path.min_message_ns
    return format_ns(startup_ns) + (f" (with its bytes at least {format_ns(least_ns)})" if least_ns > startup_ns else "")


def _rates(cluster: Cluster) -> str:
    """The rates that links of a cluster have, at any time."""
    links = [link for host in cluster.hosts for link in (host.up, host.down)]
    rates = {rate for link in links for rate in (link.bytes_per_second, *(step.bytes_per_second for step in link.steps))}
    low, high = format_rate(min(rates)), format_rate(max(rates))
    return low if low == high else f"{low} to {high}"
