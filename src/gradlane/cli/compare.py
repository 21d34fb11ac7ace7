"""`gradlane compare`: train a network on images, or emulated devices, under torch DDP and policies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from gradlane.cli import reports
from gradlane.cli.inputs import completion
from gradlane.cli.inputs.cases import parse_counts
from gradlane.cli.inputs.computing import Computing
from gradlane.cli.inputs.faults import refuse_given
from gradlane.cli.inputs.knobs import read_policies
from gradlane.cli.inputs.topology import SCALE, link_rate
from gradlane.cli.inputs.types import (
    COUNT,
    FACTOR,
    OUT_FILE,
    OUT_FOLDER,
    RANKS_PER_HOST,
    SECONDS,
    Checked,
    make_folder,
    remove_files,
    told,
    whole_number,
)
from gradlane.cli.terminal import console
from gradlane.compare.arms import ArmSpec, file_of
from gradlane.compare.evaluation import evaluate
from gradlane.compare.memory import DEMONSTRATION_BYTES, comparing_bytes
from gradlane.compare.processes import RankHosts, need_no_job, need_torch
from gradlane.compare.records import Sweep
from gradlane.compare.runner import Trial, need_room, run_all
from gradlane.core import files
from gradlane.core.backends import BACKENDS
from gradlane.core.fields import need
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.records.search_log import ANY, AUTO
from gradlane.core.timeline import Timeline
from gradlane.errors import InputError, RunError
from gradlane.lifetime import scratch_folder
from gradlane.planning import catalog
from gradlane.report.page import REPORT, write_report
from gradlane.report.page.drawing import last_iterations
from gradlane.report.page.run_folder import COMPARISON, CONFIG, LINKS, SWEEP, TRACE, files_of_run, read_links
from gradlane.report.perfetto import chrome_trace
from gradlane.report.sweep import render_sweep
from gradlane.report.table import render

# `auto`, and the policy of each paper of docs/papers.md
_FIRST = (AUTO, "mg-wfbp", "bytescheduler", "prophet", "geryon", "mercury")


def _iterations(text: str) -> str:
    """Check what --iterations is given."""
    number = r"[0-9]{1,6}"
    between = re.fullmatch(rf"({number})\.\.({number})", text)
    if text == "all" or (re.fullmatch(number, text) and int(text)) or (between and int(between[1]) <= int(between[2])):
        return text
    raise InputError(f"got {text!r}, expected how many of the last ones (1 or more), FIRST..LAST, or all")


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...", shell_complete=completion.models)
@click.option("--hosts", default="2", show_default=True, metavar="N,...", help="Emulated hosts.")
@click.option(
    "--ranks-per-host", type=RANKS_PER_HOST, default=1, show_default=True, help="Workers on each; they share its link."
)
@click.option(
    "--link", default="400mbit", show_default=True, metavar="RATE,...", help="Of each host, each way; 'none': no limit."
)
@click.option("--loopback", is_flag=True, help="No emulated hosts and links: bare loopback.")
@click.option(
    "--policies",
    "chosen",
    metavar="NAME[:KNOB=VALUE],...",
    shell_complete=completion.trained_policies,
    help=f"The policies to try, perhaps one with several values of a knob. Default: {', '.join(_FIRST)}.",
)
@click.option("--all", "everything", is_flag=True, help="Try every policy.")
@click.option(
    "--backend",
    "backends",
    metavar="NAME,...",
    help="all-reduce, server; any: only auto, which chooses between them. Default: for each policy all-reduce, or server "
    "where all-reduce cannot carry its plans.",
    shell_complete=lambda ctx, param, incomplete: completion.beginning_with(incomplete, (*BACKENDS, ANY)),
)
@click.option("--turns", "rounds", type=COUNT, default=5, show_default=True, help="Turns that each policy gets.")
@click.option("--steps", type=COUNT, default=2, show_default=True, help="Measured steps a turn.")
@click.option(
    "--clip-norm", type=FACTOR, help="Clip gradients to this norm in each step. Policies then have `owners` among them."
)
@click.option(
    "--batch-size",
    type=COUNT,
    metavar="N",
    help="Without MODEL: images a step and worker. Default: so many that computing takes as long as communicating.",
)
@click.option(
    "--servers", type=whole_number(0), default=0, help="With MODEL and --backend server: on so many hosts of their own."
)
@click.option(
    "--scale",
    type=SCALE,
    default=1.0,
    show_default=True,
    help="With MODEL: of tensors and links alike, which keeps all times.",
)
@click.option(
    "--timeout", type=SECONDS, default=60.0, show_default=True, help="Seconds after which a sum that does not end is an error."
)
@click.option("--out", type=OUT_FOLDER, help="Leave tables, plans and timelines here.")
@click.option(
    "--iterations",
    type=Checked("text", _iterations),
    default="4",
    show_default=True,
    metavar="N|FIRST..LAST|all",
    help="Of each policy in timeline.json: the last N whole ones, those of these numbers, or all that were kept.",
)
@click.option("--report", type=OUT_FILE, help="Write a report, as `gradlane report` makes it. With --out there is always one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def command(
    models: tuple[str, ...],
    hosts: str,
    ranks_per_host: int,
    link: str,
    loopback: bool,
    out: Path | None,
    iterations: str,
    report: Path | None,
    **options: Any,
) -> None:
    """Train in turns under torch DDP and under several policies, and compare.

    "x DDP" is the median, over turns, of DDP's step divided by the policy's in the same turn: of an even number of turns the
    lower of the two in the middle. p25..p75 is how far turns differ, and below five turns the whole range. A ratio above
    what the run's own bound permits is marked with "!", and a line below the table says why.

    Without MODEL it is a network on images of digits, and the parameters after the last step are compared with DDP's
    bit for bit. MODEL is a profile's file or a name of `gradlane zoo`: an emulated device with its tensors and times.
    Every number of hosts and every link given is one run. Beside each step time stands what the simulator predicts
    from what the run measured, and the time that no schedule can beat. With --out a sweep that was ended goes on
    where it was.

    The workers are on emulated hosts that are joined by links of the given rate (no root needed). Steps are timed from
    start to start.

    \b
    gradlane compare
    gradlane compare vgg16 resnet50 --hosts 2,4 --link 1gbit,10gbit --scale 0.05 --backend all-reduce,server
    """
    as_json, servers = options.pop("as_json"), options.pop("servers")
    chosen, everything, backends = (options.pop(name) for name in ("chosen", "everything", "backends"))
    if chosen is not None and everything:
        raise InputError("--all: got it with --policies, expected one of them")
    first = _FIRST if options["clip_norm"] is None else (*_FIRST, "owners")
    names = chosen.split(",") if chosen is not None else None if everything else first
    arms = _arms(None if backends is None else backends.split(","), names, servers)
    if chosen is not None:
        _need_all(chosen.split(","), arms, backends)
    counts = parse_counts("--hosts", (hosts,), least=1 if ranks_per_host > 1 else 2)
    if loopback:
        refuse_given("with --loopback, which has no links, expected one or the other", "link")
    if models:
        refuse_given("with a MODEL, expected one or the other: it is about the timeline.json of no MODEL", "iterations")
    if out is None:
        refuse_given("without --out, expected both: it is about the timeline.json that is left there", "iterations")
    rates = [None] if loopback else [link_rate(each, options["scale"]) for each in link.split(",")]
    if models and options["batch_size"] is not None:
        raise InputError("--batch-size: got it with a MODEL, expected one or the other; a profile has its batch")
    options["batch_size"] = options["batch_size"] or 0
    scale = options.pop("scale")
    if servers and (not models or loopback or all(arm.backend != "server" for arm in arms)):
        raise InputError("--servers: got it alone, expected a MODEL, --backend server and emulated hosts too")
    if not models and (len(counts) > 1 or len(rates) > 1 or scale != 1):
        raise InputError("compare: got several hosts or links, or a scale, expected a MODEL with them too")
    profiles = [Computing().read(model, argument="MODEL") for model in models]
    need_no_job("compare")
    need_torch("compare")
    trials = [
        Trial(profile, count, rate, scale, loopback, arms, ranks_per_host=ranks_per_host, **options)
        for profile in profiles for count in counts for rate in rates
    ]  # fmt: skip
    ranks = RankHosts(counts[0], rates[0], loopback, ranks_per_host, comparing_bytes(DEMONSTRATION_BYTES, len(arms)))
    if out is not None:
        told("--out", out)
        make_folder("--out", out)
        if trials:
            need_room(trials, out)
        else:
            ranks.check()
        remove_files("--out", files_of_run(out, arms), models)
    with scratch_folder() as scratch:
        folder = out or Path(scratch)
        if trials:
            sweep = Sweep(reports.command_line(), reports.machine(), run_all(trials, folder, _say))
            with files.writing(folder / SWEEP):
                files.write_bytes(folder / SWEEP, sweep.to_json())
            written = _report(folder, report, out)
            if as_json:
                click.echo(sweep.to_json())
            else:
                render_sweep(sweep, console())
                if written is not None:
                    click.echo(f"{written} is a report that opens in a browser")
            return
        timeout_s = options.pop("timeout")
        path = folder / CONFIG
        path.write_bytes(msgspec.json.encode({"out": str(folder), "arms": arms, "timeout_s": timeout_s, **options}))
        exit_code = ranks.run("gradlane.compare.worker", [str(path)], folder / LINKS)
        if exit_code:
            raise RunError.of("the comparison", exit_code)
        first = msgspec.json.decode((folder / "rank-0.json").read_bytes())
        comparison = evaluate(
            first,
            command=reports.command_line(),
            machine=reports.machine(),
            hosts=counts[0],
            link_bits_per_second=rates[0],
            ranks_per_host=ranks_per_host,
        )
        trace = _trace(folder, [arm.name for arm in arms], counts[0] * ranks_per_host, iterations)
        for name, content in ((COMPARISON, comparison.to_json()), (TRACE, trace)):
            with files.writing(folder / name):
                files.write_bytes(folder / name, content)
        written = _report(folder, report, out)
    if as_json:
        click.echo(comparison.to_json())
        return
    render(comparison, console())
    if out is not None:
        click.echo(f"{out}/comparison.json has the same; {out}/timeline.json opens in ui.perfetto.dev, ranks side by side")
    if written is not None:
        click.echo(f"{written} is a report that opens in a browser")


def _report(folder: Path, wanted: Path | None, out: Path | None) -> Path | None:
    """Write the report where it is wanted, or beside what else is left; return where it is, if anywhere."""
    target = wanted or (out / REPORT if out is not None else None)
    if target is not None:
        write_report(folder, target)
    return target


def _arms(backends: list[str] | None, names: Sequence[str] | None, servers: int) -> list[ArmSpec]:
    """The policies of `names` over each backend that carries them.

    A user's own policy is named after its class. Whether a backend can carry its plans shows only
    when they are made.

    Args:
        backends: None: for each policy all-reduce, or servers where all-reduce cannot carry it.
        names: None: `auto` and every policy.
        servers: of external servers.
    """
    for name in names or ():
        need(name != "", "--policies", name, f"one of {', '.join((AUTO, *catalog.names()))}, or several with commas")
    read_policies([name for name in names or () if name != AUTO], option="--policies")
    arms: list[ArmSpec] = []
    settings = [catalog.parse(name) for name in names] if names else None
    for backend in backends or BACKENDS:
        need(backend in (*BACKENDS, ANY), "--backend", backend, "all-reduce, server or any, or several with commas")
        external = servers if backend == "server" else 0
        carried = (AUTO, *(() if backend == ANY else catalog.names(backend, external > 0)))  # type: ignore[arg-type]
        for name, knobs in settings or [catalog.Setting(name, {}) for name in carried]:
            if backends is None and any(catalog.Setting(arm.policy, arm.knobs) == (name, knobs) for arm in arms):
                continue
            if name in carried or (catalog.is_own(name) and backend != ANY):
                text = AUTO if name == AUTO else catalog.spelled(catalog.get(name, **knobs))
                label = ArmSpec(text, backend).name if text != name else ""  # type: ignore[arg-type]
                arms.append(ArmSpec(name, backend, label, knobs, servers=external))  # type: ignore[arg-type]
    return arms


def _need_all(chosen: Sequence[str], arms: Sequence[ArmSpec], backends: str | None) -> None:
    for name in chosen:
        if all((arm.policy, arm.knobs) != catalog.parse(name) for arm in arms):
            raise InputError(f"--policies: got {name}, which {backends} cannot carry; gradlane policies lists what it can")


def _say(text: str) -> None:
    click.echo(text, err=True)


def _trace(folder: Path, names: Sequence[str], ranks: int, iterations: str) -> bytes:
    """Some iterations of all arms and ranks, for Perfetto."""
    timelines, plans, labels = [], [], []
    for name in names:
        of_ranks = [files.read(folder / file_of("timeline", name, rank), Timeline) for rank in range(ranks)]
        chosen = _chosen(iterations, of_ranks)
        timelines += of_ranks if chosen is None else [timeline.during(chosen) for timeline in of_ranks]
        plans += [files.read(folder / file_of("plan", name, rank), Plan) for rank in range(ranks)]
        labels += [name] * ranks
    layers = [layer.name for layer in files.read(folder / "profile-rank0.json", Profile).layers]
    return chrome_trace(timelines, plans, labels, layers=layers, shared_clock=True, links=read_links(folder / LINKS))


def _chosen(iterations: str, timelines: Sequence[Timeline]) -> Sequence[int] | None:
    """Which iterations of an arm are wanted; None for all."""
    if iterations == "all":
        return None
    first, _, last = iterations.partition("..")
    return range(int(first), int(last) + 1) if last else last_iterations(timelines, int(first))
