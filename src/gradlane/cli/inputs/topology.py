"""The options of `gradlane lab` that say what the cluster is, turned into a `LabSpec`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from gradlane.cli.inputs.faults import naming
from gradlane.cli.inputs.types import CLASSES, RANKS_PER_HOST, parse_time, positive, rate_or_none, whole_number
from gradlane.core.cluster import Link, random_steps
from gradlane.errors import InputError
from gradlane.lab import Flow, HostSpec, JobSpec, LabSpec
from gradlane.lab.files import read_spec
from gradlane.lab.spec import LINK_RATES, MOST_DELAY_NS, MOST_HOSTS, MOST_LOSS_PPM, MOST_SCALE, is_link_rate, ranks_on
from gradlane.units import parse_rate

_VARIED_STEPS = 10_000
SCALE = positive("a factor", MOST_SCALE)
_Function = TypeVar("_Function", bound=Callable[..., None])

_OPTIONS = (
    click.option("--file", "path", type=click.Path(path_type=Path), help="The whole spec, JSON or YAML."),
    click.option("--hosts", type=whole_number(1, MOST_HOSTS), help="How many hosts. [default: 2]"),
    click.option("--ranks-per-host", type=RANKS_PER_HOST, help="Ranks on each, which share its link. [default: 1]"),
    click.option(
        "--link", metavar="RATE",
        help="Rate of every host's link, in each direction by itself, as in 500mbit or 10gbit; none leaves links unshaped.",
    ),
    click.option("--servers", type=whole_number(0), help="So many servers (gradlane server), each on one more host."),
    click.option("--together", is_flag=True, help="Servers share the workers' hosts instead."),
    click.option("--up", multiple=True, metavar="HOST=RATE", help="Another rate from a host to the switch."),
    click.option("--down", multiple=True, metavar="HOST=RATE", help="Another rate from the switch to a host."),
    click.option(
        "--vary", multiple=True, metavar="HOST=LOW..HIGH/EVERY[/SEED]",
        help="A rate of a host's link, both ways, drawn anew all the time, as in 2=100mbit..1gbit/5s/7.",
    ),
    click.option("--slow", multiple=True, metavar="HOST=PERCENT", help="Emulated devices there take so much of their time."),
    click.option("--classes", type=CLASSES, help="Priority classes of every link, by DSCP. [default: 1]"),
    click.option("--traffic", multiple=True, metavar="FROM:TO[=RATE]", help="A flow of other traffic between two hosts."),
    click.option("--delay", metavar="TIME", help="Each link delays packets by this, each way; host to host is twice that."),
    click.option("--loss", metavar="PERCENT", help="Each link loses so many packets, each way, as in 0.1%."),
    click.option("--scale", type=SCALE, help="Of all rates, and of emulated devices' tensors. [default: 1]"),
)  # fmt: skip


@dataclass(frozen=True)
class Topology:
    """The options as they were given; each field is the option of that name."""

    path: Path | None
    hosts: int | None
    ranks_per_host: int | None
    link: str | None
    servers: int | None
    together: bool
    up: tuple[str, ...]
    down: tuple[str, ...]
    vary: tuple[str, ...]
    slow: tuple[str, ...]
    classes: int | None
    traffic: tuple[str, ...]
    delay: str | None
    loss: str | None
    scale: float | None

    def spec(self) -> LabSpec:
        """The spec of the cluster that the options describe.

        Raises:
            InputError: an option is not usable; the message names it.
        """
        if self.path is not None:
            given = [name for name, value in vars(self).items() if name != "path" and value not in (None, False, ())]
            if given:
                raise InputError(
                    f"--file: got it with --{given[0].replace('_', '-')}, expected one or the other; the file is the whole spec"
                )
            if not self.path.is_file():
                raise InputError(f"--file: got {str(self.path)!r}, which is not a file; expected the path of one")
            return read_spec(self.path)
        hosts, each, servers = self.hosts or 2, self.ranks_per_host or 1, self.servers or 0
        if self.together and servers > hosts:
            raise InputError(f"--servers: got {servers} with --together, expected at most the {hosts} hosts")
        first = 0 if self.together else hosts
        every = max(hosts, first + servers)
        if every > MOST_HOSTS:
            raise InputError(f"--servers: got {servers} beside {hosts} hosts, expected at most {MOST_HOSTS} hosts of both")
        job = JobSpec(ranks_on(hosts, each), tuple(range(first, first + servers)))
        scale = 1.0 if self.scale is None else self.scale
        return LabSpec(
            hosts=every,
            ranks_per_host=1 if servers else each,
            link_bits_per_second=link_rate(self.link, scale),
            unlike=self._unlike(every, scale),
            network_classes=1 if self.classes is None else self.classes,
            jobs=(job,) if servers else (),
            traffic=tuple(_flow(text, every) for text in self.traffic),
            scale=scale,
            delay_ns=parse_time("--delay", self.delay, MOST_DELAY_NS) if self.delay else 0,
            loss_ppm=_parts_per_million(self.loss) if self.loss else 0,
        )

    def _unlike(self, count: int, scale: float) -> tuple[HostSpec, ...]:
        hosts: dict[int, HostSpec] = {}

        def amend(host: int, **fields: object) -> None:
            hosts[host] = msgspec.structs.replace(hosts.get(host) or HostSpec(host), **fields)

        for text in self.vary:
            host, link = _varied(text, count, scale)
            amend(host, up=link, down=link)
        for text in self.up:
            host, value = _pair("--up", text, "2=100mbit", count)
            amend(host, up=_constant("--up", value, scale))
        for text in self.down:
            host, value = _pair("--down", text, "2=100mbit", count)
            amend(host, down=_constant("--down", value, scale))
        for text in self.slow:
            host, value = _pair("--slow", text, "2=150", count)
            if not re.fullmatch(r"0*[1-9][0-9]{0,5}", value):
                raise InputError(f"--slow: got {text!r}, expected HOST=PERCENT from 1 to 999999, as in 2=150")
            amend(host, compute_percent=int(value))
        return tuple(hosts[host] for host in sorted(hosts))


def options(function: _Function) -> _Function:
    """Add the options to a command, which gets them by the names of `Topology`'s fields."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def link_rate(text: str | None, scale: float = 1.0) -> int | None:
    """The value of --link for emulated hosts: bits per second, or None if links are not to be shaped.

    Args:
        text: as it was typed.
        scale: the value of --scale.
    """
    rate = rate_or_none(text)
    if text is not None and rate is not None:
        _need_link_rate("--link", text, rate // 8, scale)
    return rate


def _pair(option: str, text: str, example: str, hosts: int) -> tuple[int, str]:
    host, equals, value = text.partition("=")
    if not re.fullmatch(r"[0-9]{1,9}", host) or not equals or not value:
        raise InputError(f"{option}: got {text!r}, expected the number of a host, = and a value, as in {example}")
    _need_host(option, int(host), hosts)
    return int(host), value


def _need_host(option: str, host: int, hosts: int) -> None:
    if host >= hosts:
        raise InputError(f"{option}: got host {host}, expected one from 0 to {hosts - 1}; --hosts says how many there are")


def _constant(option: str, text: str, scale: float) -> Link:
    with naming(option):
        rate = parse_rate(text) // 8
    _need_link_rate(option, text, rate, scale)
    return Link(rate)


def _need_link_rate(option: str, text: str, bytes_per_second: int, scale: float) -> None:
    if not is_link_rate(round(bytes_per_second * scale)):
        scaled = "" if scale == 1 else f" with --scale {scale:g}"
        raise InputError(f"{option}: got {text!r}{scaled}, expected {LINK_RATES}{' in the lab' * (scale != 1)}")


def _varied(text: str, hosts: int, scale: float) -> tuple[int, Link]:
    example = "2=100mbit..1gbit/5s/7"
    host, value = _pair("--vary", text, example, hosts)
    match = re.fullmatch(r"([^/]+)\.\.([^/]+)/([^/]+)(?:/([0-9]{1,18}))?", value)
    if match is None:
        raise InputError(f"--vary: got {text!r}, expected HOST=LOW..HIGH/EVERY[/SEED], as in {example}")
    low, high, every, seed = match.groups()
    least, most = (_constant("--vary", rate, scale).bytes_per_second for rate in (low, high))
    if least > most:
        raise InputError(f"--vary: got {text!r}, expected the lower rate first, as in {example}")
    # the host's number is part of the seed, so that hosts have different rates
    with naming("--vary"):
        steps = random_steps(int(seed or 0) * 1_000_003 + host, least, most, parse_time("--vary", every), _VARIED_STEPS)
    return host, Link(steps[0].bytes_per_second, steps)


def _parts_per_million(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", text)
    if match is None:
        raise InputError(f"--loss: got {text!r}, expected a share of packets, as in 0.1%")
    if float(match[1]) >= 100:
        raise InputError(f"--loss: got {text!r}, expected less than 100%")
    return min(round(float(match[1]) * 10_000), MOST_LOSS_PPM)


def _flow(text: str, hosts: int) -> Flow:
    ends, _, rate = text.partition("=")
    hosts_named = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", ends)
    if hosts_named is None:
        raise InputError(f"--traffic: got {text!r}, expected FROM:TO[=RATE], as in 0:3=200mbit")
    source, target = int(hosts_named[1]), int(hosts_named[2])
    for host in (source, target):
        _need_host("--traffic", host, hosts)
    if source == target:
        raise InputError(f"--traffic: got {text!r}, expected two hosts, as in 0:3=200mbit")
    with naming("--traffic"):
        return Flow(source, target, max(parse_rate(rate) // 8, 1) if rate else None)
