"""Cases on the command line: profiles by file or by zoo name, networks by file or by options."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gradlane import zoo
from gradlane.cli.inputs import completion
from gradlane.cli.inputs.types import COUNT
from gradlane.core import files
from gradlane.core.cluster import Cluster
from gradlane.core.collectives import ALGORITHMS, all_reduce
from gradlane.core.network import MAX_WORKERS, Network
from gradlane.core.profile import Profile
from gradlane.core.wire_dtype import WIRE_DTYPES
from gradlane.errors import FormatError, InputError
from gradlane.planning.questions import Case
from gradlane.planning.questions.sweep import Where
from gradlane.units import format_bytes, format_ns, format_rate, parse_ns, parse_rate

PROFILE_HELP = "PROFILE is a file or a name of `gradlane zoo`."
AS_MANY = "same"
RATES, WORKERS = "10gbit", "8"  # defaults


def read_profile(text: str, device: str | None = None, batch: int | None = None, wire_dtype: str | None = None) -> Profile:
    """Read a profile's file, or take a profile from the zoo.

    Args:
        text: path of the file, or a name of the zoo.
        device: for a name of the zoo; None for the default.
        batch: samples a worker and iteration, for a name of the zoo; None for the default.
        wire_dtype: one of `WIRE_DTYPES`, as which float32 gradients travel; None for float32.

    Raises:
        InputError: `text` is neither, or `device` or `batch` is given with a file.
    """
    path = Path(text)
    if path.is_file():
        if device is not None or batch is not None:
            raise InputError(f"--device and --batch: got them with the file {text}, expected a name of the zoo")
        profile = files.read(path, Profile)
    elif path.suffix == ".json" or "/" in text:
        raise InputError(f"PROFILE: got {text!r}, which is not a file")
    else:
        profile = zoo.profile(text, device=device, batch=batch)
    return profile.with_wire_dtype(None if wire_dtype is None else WIRE_DTYPES[wire_dtype])


def read_network(path: Path) -> Where:
    """Read a network's or a cluster's file."""
    try:
        return files.read(path, Network)
    except FormatError as error:
        if "'gradlane.cluster'" not in str(error):
            raise
        return files.read(path, Cluster)


def profile_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --device, --batch and --wire-dtype, which the command hands to `read_profile`."""
    command = click.option(
        "--wire-dtype", type=click.Choice(list(WIRE_DTYPES)), help="Float32 gradients travel as this, in half of the bytes."
    )(command)
    command = click.option("--batch", type=COUNT, help="Samples a worker and iteration, for a name of the zoo.")(command)
    return click.option(
        "--device", shell_complete=completion.devices, help="Device for a name of the zoo (gradlane zoo --help lists them)."
    )(command)


def place_options(command: Callable[..., Any], *, rates: str = RATES, workers: str = WORKERS) -> Callable[..., Any]:
    """Add the options that describe networks.

    The command takes them, except --rate and --workers, as keywords for `read_place`.

    Args:
        command: gets the options.
        rates: the default of --rate, for the help; empty hides --rate.
        workers: the default of --workers, for the help.
    """
    for option in (
        click.option(
            "--algorithm", type=click.Choice(ALGORITHMS), default="ring", show_default=True, help="Of the all-reduce."
        ),
        click.option(
            "--startup",
            default="30us",
            show_default=True,
            metavar="TIME",
            help="Of a transfer between two workers, or of a message to servers.",
        ),
        click.option("--colocated", is_flag=True, help="Servers on the workers' hosts rather than on their own."),
        click.option("--servers", metavar="M", help="M parameter servers instead of all-reduce; `same`: as many as workers."),
        click.option(
            "--workers",
            multiple=True,
            metavar="N",
            help=f"Workers: 8, or 2,4,8, or 2..64 by doubling.  [default: {workers}]",
        ),
        click.option(
            "--rate",
            multiple=True,
            metavar="RATE",
            help=f"Of each link, each way: 10gbit, or 1gbit,10gbit.  [default: {rates}]",
            hidden=not rates,
        ),
    ):
        command = option(command)
    return command


@dataclass(frozen=True)
class Place:
    """Everything about a network but its rate and its number of workers."""

    algorithm: str
    startup_ns: int
    servers: str | None
    colocated: bool

    def at(self, bits_per_second: int, workers: int) -> Where:
        """The network of `workers` workers on links of this rate."""
        rate = max(1, bits_per_second // 8)
        if self.servers is None:
            return all_reduce(self.algorithm, workers, startup_ns=self.startup_ns, bytes_per_second=rate)
        servers = workers if self.servers == AS_MANY else int(self.servers)
        return Cluster.homogeneous(workers, servers, rate, colocated=self.colocated, startup_ns=self.startup_ns)


def read_place(algorithm: str, startup: str, servers: str | None, colocated: bool) -> Place:
    """The place that the options describe.

    Raises:
        InputError: an option is not usable; the message names it.
    """
    if servers is not None and servers != AS_MANY and not re.fullmatch(r"[1-9]\d{0,6}", servers):
        raise InputError(f"--servers: got {servers!r}, expected a number of them, or {AS_MANY}")
    if colocated and servers is None:
        raise InputError("--colocated: got it without --servers, expected a number of servers too")
    return Place(algorithm, parse_ns(startup), servers, colocated)


def cases(profiles: Sequence[Profile], where: Place, rates: Sequence[int], workers: Sequence[int]) -> list[Case]:
    """Make a case for each profile, rate (bits per second) and number of workers, in this order."""
    return [
        Case(profile, where.at(rate, count), {"model": profile.model, "bits_per_second": rate, "workers": count})
        for profile in profiles
        for rate in rates
        for count in workers
    ]


def parse_rates(texts: Sequence[str], default: str = RATES) -> list[int]:
    """The values of --rate, in bits per second."""
    return [parse_rate(part) for text in texts or (default,) for part in text.split(",")]


def parse_counts(option: str, texts: Sequence[str], default: str = WORKERS, least: int = 1) -> list[int]:
    """The whole numbers that an option lists: 8, or 2,4,8, or 2..64 by doubling.

    Raises:
        InputError: a text is none of these, or a number is below `least`; the message names `option`.
    """
    counts: list[int] = []
    for part in (part.strip() for text in texts or (default,) for part in text.split(",")):
        match = re.fullmatch(r"(\d{1,7})(?:\.\.(\d{1,7}))?", part)
        if match is None:
            raise InputError(f"{option}: got {part!r}, expected a number, or a range such as 2..64")
        low, high = int(match.group(1)), int(match.group(2) or match.group(1))
        if not least <= low <= high <= MAX_WORKERS:
            raise InputError(f"{option}: got {part!r}, expected {least} to {MAX_WORKERS}, the smaller first")
        while low <= high:
            counts.append(low)
            low *= 2
    return counts


def describe(case: Case) -> str:
    """One line for people: the model, and the network that its gradients cross."""
    profile, where = case.profile, case.where
    head = f"{profile.model}, {len(profile.tensors)} tensors, {format_bytes(profile.size_bytes)}"
    if isinstance(where, Network):
        return (
            f"{head}, all-reduce of {where.workers} workers, startup {format_ns(where.startup_ns)}, "
            f"{format_rate(where.bytes_per_second)}"
        )
    return (
        f"{head}, {len(where.workers)} workers and {len(where.servers)} servers on {len(where.hosts)} hosts, startup "
        f"{format_ns(where.startup_ns)}, links of {format_rate(where.hosts[0].up.bytes_per_second)}"
    )
