"""`gradlane probe`: what an all-reduce costs: a startup and a rate, with the error of the fit."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import click
import msgspec
from rich.table import Table

from gradlane.cli.inputs.types import CLASSES, OUT_FILE, RANKS, SECONDS, rate_or_none, whole_number
from gradlane.cli.priority import probe as probe_priority
from gradlane.cli.terminal import console, print_table
from gradlane.compare.processes import run_on_ranks
from gradlane.core import files
from gradlane.core.network import Network
from gradlane.errors import InputError, RunError
from gradlane.units import format_bytes, format_ns, format_rate

_PRIORITY_S = 3.0  # seconds in which two connections send side by side: enough to tell


@click.command()
@click.option("--hosts", type=RANKS, default=2, show_default=True, help="Ranks of the all-reduce.")
@click.option("--link", help="Probe emulated hosts with links of this rate, as in 500mbit. Default: bare loopback.")
@click.option("--seconds", type=SECONDS, default=10.0, show_default=True, help="About how long to measure.")
@click.option("--out", type=OUT_FILE, help="Write the network as JSON, for gradlane plan.")
@click.option("--json", "as_json", is_flag=True, help="Print the network as JSON.")
@click.option(
    "--priority", is_flag=True, help="Instead: do marks (DSCP) survive the path, and are marked packets served first?"
)
@click.option("--listen", metavar="HOST:PORT", help="With --priority: measure here what the senders send.")
@click.option("--connect", metavar="HOST:PORT", help="With --priority: send to the host that listens there.")
@click.option("--senders", type=whole_number(1, 2), default=2, show_default=True,
              help="With --priority: two meet in the switch, one in its own queue.")  # fmt: skip
@click.option(
    "--classes", type=CLASSES, default=1, show_default=True, help="With --priority on emulated hosts: of their links."
)
def command(
    hosts: int,
    link: str | None,
    seconds: float,
    out: Path | None,
    as_json: bool,
    priority: bool,
    listen: str | None,
    connect: str | None,
    senders: int,
    classes: int,
) -> None:
    """Time all-reduces (torch.distributed, Gloo) in a sweep of sizes, alone and in streams, and fit startup and rate.

    A job that is being trained probes its own network at `attach`; this is for planning ahead.

    \b
    gradlane probe --priority --listen 10.0.0.1:7000      on one host, and on two others:
    gradlane probe --priority --connect 10.0.0.1:7000
    gradlane probe --priority --link 200mbit --classes 2  on emulated hosts
    """
    if priority:
        probe_priority(listen, connect, senders, link, classes, min(seconds, _PRIORITY_S), as_json)
        return
    if listen is not None or connect is not None:
        raise InputError("probe: got --listen or --connect without --priority, expected both")
    with tempfile.TemporaryDirectory(prefix="gradlane-") as scratch:
        exit_code = run_on_ranks(
            "gradlane.live.backends.probe_job", [scratch, str(seconds)], hosts, rate_or_none(link), link is None
        )
        if exit_code:
            raise RunError("the probe", exit_code)
        network = files.read(Path(scratch, "network.json"), Network)
        samples = msgspec.json.decode(Path(scratch, "samples.json").read_bytes(), type=list[tuple[int, int]])
        streams = msgspec.json.decode(Path(scratch, "streams.json").read_bytes(), type=list[tuple[int, int, int]])
    if out is not None:
        files.write(out, network)
    if as_json:
        click.echo(files.dumps(network))
        return
    table = Table(
        "size", "median", "fit", "error", "in a stream", "fit", title=f"all-reduce among {hosts} ranks", title_justify="left"
    )
    for size in sorted({size for size, _ in samples}):
        measured = statistics.median(duration for other, duration in samples if other == size)
        fitted = network.cost_ns(size)
        row = [format_bytes(size), format_ns(round(measured)), format_ns(fitted), f"{fitted / measured - 1:+.0%}"]
        together = [duration / messages for other, messages, duration in streams if other == size]
        if together:
            messages = next(count for other, count, _ in streams if other == size)
            row += [
                format_ns(round(each)) for each in (statistics.median(together), network.stream_ns(size, messages) / messages)
            ]
        table.add_row(*row)
    shown = console()
    print_table(table)
    for piece in network.segments:
        upto = "" if piece is network.segments[-1] else f" up to {format_bytes(piece.up_to_bytes)}"
        rate = format_rate(piece.bytes_per_second)
        shown.print(f"startup {format_ns(piece.startup_ns)}{_hidden(piece.latency_ns)}, {rate}{upto}")
    if network.min_message_ns:
        shown.print(f"no message takes less than {format_ns(network.min_message_ns)}{_hidden(network.min_message_latency_ns)}")
    shown.print(f"median error of the fit {network.residual:.1%}; {network.source}", highlight=False)


def _hidden(latency_ns: int) -> str:
    return f", {format_ns(latency_ns)} of it passing behind other messages" if latency_ns else ""
