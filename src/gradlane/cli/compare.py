"""`gradlane compare`: the main job. A real network on real images, under torch DDP and under every policy."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from gradlane import policies
from gradlane.cli.jobs import fail, rate_or_none, run_on_ranks
from gradlane.core import files
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.timeline import Timeline
from gradlane.errors import InputError
from gradlane.report.perfetto import chrome_trace
from gradlane.report.table import Comparison, Result, render
from gradlane.tune import catalog

BASELINE, ALONE = "torch-ddp", "no-communication"


@click.command()
@click.option("--hosts", default=2, show_default=True, help="Worker processes, each on an emulated host of its own.")
@click.option("--link", default="200mbit", show_default=True, help="Rate of each host's link, each way; 'none' for no limit.")
@click.option("--loopback", is_flag=True, help="No emulated hosts and links: bare loopback.")
@click.option("--policies", "chosen", metavar="NAME,...", help="The policies to try. Default: all that all-reduce carries.")
@click.option("--rounds", default=3, show_default=True, help="Turns that each policy gets.")
@click.option("--steps", default=4, show_default=True, help="Measured steps a turn.")
@click.option(
    "--batch-size", default=0, help="Images a step and worker. Default: so many that computing takes as long as communicating."
)
@click.option("--timeout", default=60.0, show_default=True, help="Seconds after which a sum that does not end is an error.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Leave the table, plans and timelines here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def command(
    hosts: int,
    link: str,
    loopback: bool,
    chosen: str | None,
    rounds: int,
    steps: int,
    batch_size: int,
    timeout: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Train a network on images of digits, in turns under torch DDP and under each policy, and compare.

    The workers are joined by links of the given rate, each on an emulated host (no root needed). Steps are
    timed from start to start; the parameters after the last step are compared with DDP's bit for bit.
    """
    names = tuple(chosen.split(",")) if chosen else catalog.names("all-reduce")
    for name in names:
        catalog.get(name)
    if hosts < 2 or rounds < 1 or steps < 1 or batch_size < 0:
        raise InputError("compare: expected at least 2 hosts, 1 round and 1 step")
    link_bits = None if loopback else rate_or_none(link)
    with tempfile.TemporaryDirectory(prefix="gradlane-") as scratch:
        folder = out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        config = {"out": str(folder), "policies": names, "rounds": rounds, "steps": steps, "batch_size": batch_size}
        path = Path(scratch, "config.json")
        path.write_bytes(msgspec.json.encode({**config, "timeout_s": timeout}))
        exit_code = run_on_ranks("gradlane.live.comparison", [str(path)], hosts, link_bits, loopback)
        if exit_code:
            fail("the comparison", exit_code)
        first = msgspec.json.decode((folder / "rank-0.json").read_bytes())
        comparison = _comparison(first, hosts, link_bits)
        (folder / "comparison.json").write_bytes(comparison.to_json())
        (folder / "timeline.json").write_bytes(_trace(folder, names, hosts))
    if as_json:
        click.echo(comparison.to_json())
        return
    render(comparison, Console())
    if out is not None:
        click.echo(f"{out}/comparison.json has the same; {out}/timeline.json opens in ui.perfetto.dev, ranks side by side")


def _comparison(first: dict[str, Any], hosts: int, link_bits: int | None) -> Comparison:
    arms = first["arms"]
    compute_ns = statistics.median(arms[ALONE]["step_ns"])
    communicate_ns = first["communicate_ns"]
    baseline_ns = statistics.median(arms[BASELINE]["step_ns"])
    least_ns = max(compute_ns, communicate_ns)
    results = []
    for name, arm in arms.items():
        if name == ALONE:
            continue  # no policy: it is in the bound
        exposed = max(0.0, statistics.median(arm["step_ns"]) - compute_ns)
        results.append(
            Result(
                policy=name,
                step_ns=tuple(arm["step_ns"]),
                hidden=max(0.0, 1 - exposed / communicate_ns),
                final_loss=arm["final_loss"],
                # beyond two ranks a sum's last bits depend on how it is cut, between two runs of DDP too
                equal_to_ddp=arm["equal_to_ddp"] if hosts == 2 else arm["equal_to_ddp"] or None,
                note="default" if name == policies.DEFAULT else "",
            )
        )
    return Comparison(
        command=shlex.join(["gradlane", *sys.argv[1:]]),
        machine=f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        hosts=hosts,
        link_bits_per_second=link_bits,
        model=first["model"],
        parameter_bytes=first["parameter_bytes"],
        bound=baseline_ns / least_ns,
        bound_text=(
            f"a step takes at least the longer of computing ({compute_ns / 1e6:.0f} ms alone) and communicating "
            f"({communicate_ns / 1e6:.0f} ms as one all-reduce); hidden: the part of the latter that does not lengthen the step"
        ),
        results=tuple(results),
    )


def _trace(folder: Path, names: tuple[str, ...], hosts: int) -> bytes:
    timelines, plans, labels = [], [], []
    for name in names:
        for rank in range(hosts):
            timelines.append(files.read(folder / f"timeline-{name}-rank{rank}.json", Timeline))
            plans.append(files.read(folder / f"plan-{name}-rank{rank}.json", Plan))
            labels.append(name)
    layers = [layer.name for layer in files.read(folder / "profile-rank0.json", Profile).layers]
    return chrome_trace(timelines, plans, labels, layers=layers, shared_clock=True)
