"""`python -m experiments.fidelity`: run the grid, or a part of it, then its finals, and make the page."""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import resource
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from experiments.fidelity.anatomy import Anatomy, dissect
from experiments.fidelity.page import page
from experiments.fidelity.results import Results, TrialResult, backend_of, policy_of, read, spread, write
from gradlane import zoo
from gradlane.compare.arms import BASELINE, ArmSpec, file_of
from gradlane.compare.records import hosts_text
from gradlane.compare.runner import Trial, at_ratio, cells_of, predicted, run_all
from gradlane.core import files
from gradlane.core.backends import BACKENDS
from gradlane.core.timeline import Timeline
from gradlane.planning import catalog

MODELS = ("alexnet", "vgg16", "googlenet", "resnet50", "inception-v3", "bert-base")
RATIOS = (0.5, 1.0, 2.0)
HOSTS = ((2, 1), (3, 1), (4, 1))
Shape = tuple[int, int]
"""Hosts, and ranks on each."""
MEASURED = Path(__file__).with_name("measured.json")
OF_HOSTS = MEASURED.with_name("of_hosts.json")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.fidelity", description=__doc__)
    add = parser.add_argument
    add("--models", type=_names, default=MODELS, metavar="NAME,...", help="of gradlane zoo")
    add("--ratios", type=_numbers, default=RATIOS, metavar="R,...", help="communication over computing, on an ideal link")
    add("--hosts", type=_shapes, default=HOSTS, metavar="N,...", help="or NxRANKS: of several ranks each")
    add("--in-turns", action="store_true", help="for each model and ratio one number of hosts, in turns, in place of all")
    add("--backends", type=_names, default=tuple(BACKENDS), metavar="NAME,...")
    add("--policies", type=_names, metavar="NAME,...", help="default: all that a backend carries")
    add("--rounds", type=int, default=3, help="turns that each arm gets")
    add("--steps", type=int, default=1, help="measured steps a turn")
    add("--step-ms", type=float, default=250.0, help="to which computing is stretched, on two hosts; on more in proportion")
    add("--megabytes", type=float, default=8.0, help="to which tensors are shrunk, links with them")
    add("--out", type=Path, default=Path("out/fidelity"), help="of trials; those that are there are not run again")
    add("--again", type=float, metavar="PART", help="run trials again during which others took more of the machine than this")
    add("--finals", type=int, metavar="ROUNDS", help="of trials whose results are there: only the best policies, for longer")
    add("--json", type=Path, default=MEASURED, help="results; trials that are not of this call stay in it")
    add("--add", action="store_true", help="to a trial's results, rather than in their place: other policies of it")
    add("--page", type=Path, help="write the page from the results and run nothing")
    given = parser.parse_args()
    if given.page is not None:
        given.page.write_text(page(read(given.json), read(OF_HOSTS) if OF_HOSTS.exists() else None))
        return
    trials = [
        (model, count, ratio)
        for (nth, model), (other, ratio) in itertools.product(enumerate(given.models), enumerate(given.ratios))
        for count in ([given.hosts[(nth + other) % len(given.hosts)]] if given.in_turns else given.hosts)
    ]
    for place, (model, shape, ratio) in enumerate(trials):
        print(f"{place + 1} of {len(trials)}, ratio {ratio:g}", file=sys.stderr)
        if given.finals is not None:
            _judge(model, shape, ratio, given)
            continue
        trial = _trial(model, shape, ratio, given, _arms(given), given.rounds)
        others = _run(trial, given.out, given.again)
        folder = given.out / trial.key
        result = TrialResult(
            model, shape[0], ratio, others, tuple(cells_of(trial, folder)), _anatomies(trial, folder), ranks_per_host=shape[1]
        )
        before = _kept(given.json, model, shape, ratio) if given.add else None
        _keep(result if before is None else result.beside(before), given.json, command=_command())
        median, most = spread([cell.error for cell in result.own])
        print(f"error {median:.1%} (median), {most:.1%} (9 of 10 are below), others {result.others:.0%}", file=sys.stderr)


def _judge(model: str, shape: Shape, ratio: float, given: argparse.Namespace) -> None:
    """The finals of a trial: a run of its own, whose times say how good the choice was."""
    result = _kept(given.json, model, shape, ratio)
    if result is None:
        on = hosts_text(*shape)
        sys.exit(f"{given.json} has no trial of {model} on {on} at ratio {ratio:g}: run it first, without --finals")
    arms = [ArmSpec(policy_of(cell), backend_of(cell)) for cell in result.finalists]
    trial = _trial(model, shape, ratio, given, arms, given.finals)
    _run(trial, given.out, given.again)
    result = msgspec.structs.replace(result, finals=tuple(cells_of(trial, given.out / trial.key)))
    _keep(result, given.json, finals=_command())
    losses = ", ".join(f"{result.judged_loss_of_choice(backend):.1%} ({backend})" for backend in result.backends)
    print(f"the choice is slower than the best by {losses}", file=sys.stderr)


def _arms(given: argparse.Namespace) -> list[ArmSpec]:
    return [
        ArmSpec(name, backend)
        for backend in given.backends for name in given.policies or catalog.names(backend)
        if name in catalog.names(backend)
    ]  # fmt: skip


def _trial(model: str, shape: Shape, ratio: float, given: argparse.Namespace, arms: Sequence[ArmSpec], rounds: int) -> Trial:
    hosts, ranks_per_host = shape
    # more ranks have less of the processors each, which handle as many messages
    profile, bits, scale = at_ratio(zoo.profile(model), ratio, given.step_ms * hosts * ranks_per_host / 2, given.megabytes)
    return Trial(profile, hosts, bits, scale, False, arms, rounds, given.steps, 0, 60.0, ranks_per_host=ranks_per_host)


def _run(trial: Trial, out: Path, again: float | None) -> float:
    """Run the trial if its outcome is not there; the part of the machine that others took meanwhile."""
    folder = out / trial.key
    aside = folder / "others.json"
    if again is not None and aside.exists() and msgspec.json.decode(aside.read_bytes(), type=float) > again:
        shutil.rmtree(folder)
    before = _busy_and_all()
    fresh = not (folder / "rank-0.json").exists()
    run_all([trial], out, lambda text: print(text, file=sys.stderr))
    if fresh:
        (busy, total), (busy_before, total_before) = _busy_and_all(), before
        aside.write_bytes(msgspec.json.encode(max(0.0, (busy - busy_before) / (total - total_before))))
    return msgspec.json.decode(aside.read_bytes(), type=float) if aside.exists() else 0.0


def _anatomies(trial: Trial, folder: Path) -> dict[str, Anatomy]:
    anatomies = {}
    for name, plan, _, outcome in predicted(trial, folder):
        if name != BASELINE:
            live = files.read(folder / file_of("timeline", name, 0), Timeline)
            anatomy = dissect(plan, live, outcome.timeline())
            if anatomy is not None:
                anatomies[name] = anatomy
    return anatomies


def _busy_and_all() -> tuple[float, float]:
    """Seconds of all processors that went to processes that are not ours, and all seconds."""
    fields = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    tick = os.sysconf("SC_CLK_TCK")
    own = sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )
    return (sum(fields) - fields[3] - fields[4]) / tick - own, sum(fields) / tick


def _kept(path: Path, model: str, shape: Shape, ratio: float) -> TrialResult | None:
    """The results of a trial that are in the file, if any."""
    trials = read(path).trials if path.exists() else ()
    return next((each for each in trials if each.same_as(model, shape[0], ratio, shape[1])), None)


def _keep(result: TrialResult, path: Path, **commands: str) -> None:
    """commands: those to say in the file from now on, of trials or finals."""
    before = read(path) if path.exists() else Results("", "", ())
    of = (result.model, result.hosts, result.ratio, result.ranks_per_host)
    trials = [trial for trial in before.trials if not trial.same_as(*of)] + [result]
    trials.sort(key=lambda trial: (trial.hosts, trial.ranks_per_host, trial.ratio, trial.model))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release().split('-')[0]}"
    write(path, msgspec.structs.replace(before, machine=machine, trials=tuple(trials), **commands))


def _command() -> str:
    return shlex.join(["python", "-m", "experiments.fidelity", *sys.argv[1:]])


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(each) for each in text.split(","))


def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple((int(hosts), int(ranks or 1)) for hosts, _, ranks in (each.partition("x") for each in text.split(",")))


main()
