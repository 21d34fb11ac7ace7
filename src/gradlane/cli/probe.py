"""`gradlane probe`: what an all-reduce costs: a startup and a rate, with the error of the fit."""

from __future__ import annotations

import statistics
from pathlib import Path

import click
import msgspec
from msgspec import UnsetType
from rich.table import Table

from gradlane.cli.inputs.faults import refuse_given
from gradlane.cli.inputs.topology import link_rate
from gradlane.cli.inputs.types import CLASSES, OUT_FILE, RANKS, RANKS_PER_HOST, SECONDS, Choice, whole_number
from gradlane.cli.priority import probe as probe_priority
from gradlane.cli.terminal import console, print_table
from gradlane.compare.processes import RankHosts, need_no_job, need_torch
from gradlane.core import files
from gradlane.core.backends import ALGORITHMS, HIERARCHICAL_PAYS, Algorithm
from gradlane.core.bus import Stage
from gradlane.core.network import Network
from gradlane.errors import InputError, RunError
from gradlane.lifetime import scratch_folder
from gradlane.units import format_bytes, format_ns, format_rate

Samples = list[tuple[int, int]]
"""Sizes in bytes and durations in ns."""
Streams = list[tuple[int, int, int]]
"""Sizes in bytes, numbers of messages and durations in ns."""
_PRIORITY_S = 3.0  # seconds in which two connections send side by side: enough to tell


@click.command()
@click.option("--hosts", type=RANKS, default=2, show_default=True, help="Hosts of the all-reduce.")
@click.option("--ranks-per-host", type=RANKS_PER_HOST, default=1, show_default=True, help="Ranks on each; they share its link.")
@click.option(
    "--algorithm",
    type=Choice(ALGORITHMS),
    help="Which sums the network is of: over all ranks at once, or within each host first.  [default: the faster ones]",
)
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
    ranks_per_host: int,
    algorithm: Algorithm | None,
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

    On hosts of several ranks it times both levels, too: sums within the hosts, and between them. The network then has a bus,
    unless flat sums are faster. A job that is being trained probes its own network at `attach`; this is for planning ahead.

    \b
    gradlane probe --hosts 2 --ranks-per-host 4 --link 1gbit
    gradlane probe --priority --listen 10.0.0.1:7000      on one host, and on two others:
    gradlane probe --priority --connect 10.0.0.1:7000
    gradlane probe --priority --link 200mbit --classes 2  on emulated hosts
    """
    if priority:
        refuse_given(
            "with --priority, which measures no all-reduce, expected one or the other",
            "hosts", "ranks_per_host", "algorithm", "out",
        )  # fmt: skip
        probe_priority(listen, connect, senders, link, classes, min(seconds, _PRIORITY_S), as_json)
        return
    refuse_given("without --priority, expected both", "listen", "connect", "senders", "classes")
    if algorithm == "hierarchical" and (ranks_per_host == 1 or link is None):
        raise InputError(
            "--algorithm: got hierarchical, expected hosts of several ranks, as in --ranks-per-host 2 --link 1gbit"
        )
    need_no_job("probe")
    need_torch("probe")
    with scratch_folder() as scratch:
        ranks = RankHosts(hosts, link_rate(link), link is None, ranks_per_host)
        exit_code = ranks.run("gradlane.live.backends.probe_job", [scratch, str(seconds)])
        if exit_code:
            raise RunError.of("the probe", exit_code)
        timed = msgspec.json.decode(Path(scratch, "timed.json").read_bytes(), type=_Timed)
        networks = {name: files.read(path, Network) for name in ALGORITHMS if (path := Path(scratch, f"{name}.json")).exists()}
    chosen = algorithm or timed.faster
    network = networks[chosen]
    if out is not None:
        with files.writing(out):
            files.write(out, network)
    if as_json:
        click.echo(files.dumps(network))
        return
    _show(networks["flat"], f"all-reduce among {hosts * ranks_per_host} ranks", timed.samples, timed.streams)
    if timed.levels is not None:
        _show_levels(networks["hierarchical"], timed.levels)
        size_bytes, flat_ns, hierarchical_ns = timed.turns
        console().print(
            f"{format_bytes(size_bytes)} in turns: flat {format_ns(flat_ns)}, hierarchical {format_ns(hierarchical_ns)}; "
            f"{chosen} sums are what is written, and what a session is given with this network"
        )


class _Levels(msgspec.Struct):
    """What hosts of several ranks took, see `gradlane.live.backends.probe_levels.Levels`."""

    reduce_scatter: Samples
    all_gather: Samples
    broadcast: Samples
    between: Samples
    streams: Streams


class _Timed(msgspec.Struct):
    """What the ranks timed. turns: a size in bytes, and what flat and hierarchical sums of it took in ns."""

    samples: Samples
    streams: Streams
    levels: _Levels | None = None
    turns: tuple[int, int, int] = (0, 0, 0)

    @property
    def faster(self) -> Algorithm:
        _, flat_ns, hierarchical_ns = self.turns
        return "hierarchical" if hierarchical_ns * HIERARCHICAL_PAYS < flat_ns else "flat"


def _show(network: Network, title: str, samples: Samples, streams: Streams) -> None:
    """What messages took beside what the network says of them, and the network."""
    table = Table("size", "median", "fit", "error", "in a stream", "fit", title=title, title_justify="left")
    for size in sorted({size for size, _ in samples}):
        measured = _median(samples, size) or 1
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


def _show_levels(network: Network, levels: _Levels) -> None:
    """The stages of hierarchical sums: within a host, and between hosts."""
    bus = network.bus
    assert not isinstance(bus, UnsetType)
    title = f"within hosts of {bus.devices} ranks, all at once"
    table = Table("size", "reduce-scatter", "all-gather", "fit", "broadcast", "fit", title=title, title_justify="left")
    for size in sorted({size for size, _ in levels.reduce_scatter + levels.all_gather + levels.broadcast}):
        row = [format_bytes(size)]
        for samples in (levels.reduce_scatter, levels.all_gather, bus.reduce_scatter, levels.broadcast, bus.broadcast):
            if isinstance(samples, Stage):
                row.append(format_ns(samples.startup_ns + samples.bytes_ns(size)))
            else:
                measured = _median(samples, size)
                row.append("" if measured is None else format_ns(round(measured)))
        table.add_row(*row)
    print_table(table)
    console().print(
        f"startup {format_ns(bus.startup_ns)}, {format_rate(bus.bytes_per_second)} from rank to rank; {bus.source}",
        highlight=False,
    )
    title = f"all-reduce between {network.hosts} hosts, of what is summed within them"
    _show(network.between, title, levels.between, levels.streams)


def _median(samples: Samples, size: int) -> float | None:
    taken = [duration for other, duration in samples if other == size]
    return statistics.median(taken) if taken else None


def _hidden(latency_ns: int) -> str:
    return f", {format_ns(latency_ns)} of it passing behind other messages" if latency_ns else ""
