"""Reads what `gradlane compare --out` left, as facts for a report."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gradlane.compare.arms import ALONE, BASELINE, ArmSpec, file_of, in_file, measured_place
from gradlane.compare.evaluation import answer, trial_remarks
from gradlane.compare.records import Cell, Comparison, Sweep, hosts_text
from gradlane.core import files
from gradlane.core.fields import need, need_int
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.records.search_log import SearchLog
from gradlane.core.records.speedup import Speedup, turn_times
from gradlane.core.timeline import Timeline
from gradlane.errors import FormatError, InputError
from gradlane.lab.links.gauges import read_samples
from gradlane.planning.questions.prediction import predict
from gradlane.report.page import facts
from gradlane.report.page.drawing import draw, draw_simulated, parts_of, plan_facts, quantile, typical_iterations
from gradlane.report.page.launched import left_something, of_launch, sessions_in, with_plan
from gradlane.report.perfetto import LinkCount
from gradlane.units import format_bytes, format_rate

COMPARISON, SWEEP, CONFIG, LINKS = "comparison.json", "sweep.json", "config.json", "links.jsonl"
TRACE, REPORT = "timeline.json", "report.html"
"""Names of files in a run's folder."""

_Record = TypeVar("_Record")


def read_run(folder: Path) -> facts.Facts:
    """Read the folder of a comparison, of a sweep over models and networks, or of a job.

    Args:
        folder: what `gradlane compare --out` or `gradlane launch --timeline` was given.

    Raises:
        InputError: it is not such a folder, or lacks a file.
        FormatError: a file in it is not what it should be.
    """
    try:
        return _read_run(folder)
    except OSError as error:
        raise InputError(
            f"{error.filename}: got no file that can be read ({error.strerror}), expected what a run leaves that has ended; "
            "run it again"
        ) from None


def _read_run(folder: Path) -> facts.Facts:
    if (folder / COMPARISON).exists():
        comparison = _decoded(folder / COMPARISON, Comparison.from_json)
        return facts.Facts("gradlane compare", _about(comparison), [_of_comparison(comparison, _Run(folder))])
    if (folder / SWEEP).exists():
        sweep = _decoded(folder / SWEEP, Sweep.from_json)
        trials = [_of_trial(cells, sweep.model_of(cells), _Run(folder / cells[0].folder)) for cells in sweep.trials]
        return facts.Facts("gradlane compare", _about(sweep), trials)
    if left_something(folder):
        return facts.Facts("gradlane launch", [], [of_launch(each) for each in sessions_in(folder)])
    raise InputError(
        f"{folder}: got a folder without {COMPARISON}, {SWEEP} or a rank's timeline, expected what `gradlane compare --out` or "
        "`gradlane launch --timeline` left"
    )


def files_of_run(folder: Path, arms: Sequence[ArmSpec]) -> list[Path]:
    """What a comparison of some arms, or a sweep, left in `folder`; not the folders of a sweep's runs.

    Args:
        folder: what `gradlane compare --out` was given.
        arms: but torch DDP's.
    """
    names = _one_of([BASELINE, *(in_file(arm.name) for arm in arms)])
    places = _one_of([ArmSpec("ddp").place, *(arm.place for arm in arms)])
    of_ranks = f"rank-|profile-rank|(timeline|plan|network)-{names}-rank|network-{places}-rank"
    once = _one_of([COMPARISON, SWEEP, CONFIG, LINKS, TRACE, REPORT])
    form = re.compile(rf"({of_ranks})[0-9]{{1,7}}\.json|search-{names}\.json|{once}")
    return [path for path in folder.iterdir() if form.fullmatch(path.name)]


def _one_of(names: Iterable[str]) -> str:
    return f"({'|'.join(map(re.escape, names))})"


def read_links(path: Path) -> dict[str, list[LinkCount]]:
    """The counts that a lab sampled, by host and direction of its link; empty without a lab."""
    links: dict[str, list[LinkCount]] = {}
    for sample in read_samples(path) if path.exists() else ():
        for way, gauges in (("up", sample.up), ("down", sample.down)):
            for host, gauge in enumerate(gauges):
                if gauge is not None:
                    count = LinkCount(sample.at_ns, gauge.passed_bytes, gauge.queued_bytes)
                    links.setdefault(f"host{host} {way}", []).append(count)
    return links


def _decoded(path: Path, decode: Callable[[bytes], _Record]) -> _Record:
    """What a file has. An error about it names the file."""
    try:
        return decode(path.read_bytes())
    except FormatError as error:
        raise error.of_file(path) from None


def _about(run: Comparison | Sweep) -> list[tuple[str, str]]:
    return [("command", run.command), ("machine", run.machine)]


class _Given(msgspec.Struct):
    """What a run was asked for, as far as it is needed here."""

    arms: tuple[ArmSpec, ...]


class _Steps(msgspec.Struct):
    step_ns: tuple[int, ...]

    def __post_init__(self) -> None:
        need(len(self.step_ns) > 0, "step_ns", "no steps", "one or more")


class _Outcome(msgspec.Struct):
    """What rank 0 measured, as far as no record has it."""

    arms: dict[str, _Steps]
    all_reduce_ns: tuple[int, ...]
    turns: int

    def __post_init__(self) -> None:
        need(ALONE in self.arms, "arms", ", ".join(self.arms), f"{ALONE!r} among them")
        need(len(self.all_reduce_ns) > 0, "all_reduce_ns", "no times", "one or more")
        need_int("turns", self.turns, 1, 1_000_000)


class _Run:
    """One run's folder: what it left of each arm."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._links = read_links(folder / LINKS)
        specs = _decoded(folder / CONFIG, lambda data: files.decode(data, _Given, "$", "gradlane.compare config")).arms
        self._specs = {BASELINE: ArmSpec("ddp"), **{spec.name: spec for spec in specs}}
        outcome = _decoded(folder / "rank-0.json", lambda data: files.decode(data, _Outcome, "$", "gradlane.compare rank"))
        # by turns, as the bound of the comparison counts them
        alone_ns = statistics.median(turn_times(outcome.arms[ALONE].step_ns, outcome.turns))
        summing_ns = statistics.median(turn_times(outcome.all_reduce_ns, outcome.turns))
        self.lines = [
            ("computing alone", alone_ns / 1e6),
            ("all gradients as one all-reduce", summing_ns / 1e6),
        ]
        profile = files.read(folder / "profile-rank0.json", Profile)
        if not profile.compute_ns:
            raise InputError(f"{folder / 'profile-rank0.json'}: got a profile whose steps take no time, expected times")
        self._profile = profile.stretched(alone_ns / profile.compute_ns)
        self.layers = [layer.name for layer in profile.layers]

    def arm(self, name: str, step_ns: Sequence[int], turns: int, **told: Any) -> facts.ArmFacts:
        """An arm's facts.

        Args:
            name: the arm.
            step_ns: its steps, as many in each turn.
            turns: how many turns.
            told: fields of `ArmFacts` that a record has.
        """
        steps = [step / 1e6 for step in step_ns]
        each = max(1, len(steps) // turns)
        timelines = [files.read(path, Timeline) for path in self._by_rank("timeline", name)]
        plan, timelines = with_plan(self._folder / file_of("plan", name, 0), timelines)
        searches = self._folder / file_of("search", name)
        return facts.ArmFacts(
            name=name,
            turns_ms=[steps[at : at + each] for at in range(0, len(steps), each)],
            median_ms=statistics.median(steps) if steps else None,
            low_ms=quantile(steps, 0.1) if steps else None,
            high_ms=quantile(steps, 0.9) if steps else None,
            parts=parts_of(timelines[0], plan, self._profile),
            plan=plan_facts(plan, self._profile),
            timeline=self._timeline(name, plan, timelines, statistics.median(step_ns) if step_ns else 0),
            searches=_searches(files.read(searches, SearchLog)) if searches.exists() else [],
            **told,
        )

    def _by_rank(self, what: str, arm: str) -> Iterator[Path]:
        """One file for each rank. That of rank 0 has to be there."""
        found = (self._folder / file_of(what, arm, rank) for rank in itertools.count())
        yield next(found)
        yield from itertools.takewhile(Path.exists, found)

    def _timeline(self, name: str, plan: Plan, timelines: Sequence[Timeline], step_ns: float) -> facts.Timeline | None:
        iterations = typical_iterations(timelines, step_ns)
        if not iterations:
            return None
        drawn = draw(plan, timelines, iterations, self._links)
        place = measured_place(self._folder, name, self._specs[name], plan)
        simulated = predict(plan, self._profile, place).timeline()
        return msgspec.structs.replace(drawn, simulated=draw_simulated(plan, simulated, len(iterations)))


def _of_comparison(comparison: Comparison, run: _Run) -> facts.TrialFacts:
    arms = [
        run.arm(
            result.policy, result.step_ns, comparison.turns,
            note=result.note, speedup=_numbers(result.speedup), beats_bound=result.beats_bound, hidden=result.hidden,
            equal_to_ddp=result.equal_to_ddp,
        )
        for result in comparison.results
    ]  # fmt: skip
    bound = comparison.bound
    cluster = _cluster(comparison.hosts, comparison.ranks_per_host, comparison.link_bits_per_second)
    speedups = {result.policy: result.speedup for result in comparison.results}
    limit = None if bound is None else bound.ratio
    found = answer(speedups, limit)
    return facts.TrialFacts(
        title=f"{comparison.model}, {format_bytes(comparison.parameter_bytes)} of parameters, {cluster}",
        answer=found.sentence,
        number=found.number,
        bound="" if bound is None else f"{bound.ratio:.2f} times as fast as DDP ({bound.spread}): {comparison.bound_text}",
        lines=run.lines,
        layers=run.layers,
        arms=arms,
        baseline=BASELINE,
        recommended=found.arm,
        limit=limit,
        remarks=list(comparison.remarks),
    )


def _of_trial(cells: Sequence[Cell], model: str, run: _Run) -> facts.TrialFacts:
    arms = [
        run.arm(
            cell.arm, cell.step_ns, cell.turns,
            note="", speedup=_numbers(cell.speedup), beats_bound=cell.beats_bound, equal_to_ddp=cell.equal_to_ddp,
            predicted_ms=cell.predicted_ns / 1e6, bound_ms=cell.bound_ns / 1e6,
        )
        for cell in cells
    ]  # fmt: skip
    first = cells[0]
    scale = f", tensors and links x {first.scale:g}" if first.scale != 1 else ""
    least_ms = min(cell.bound_ns for cell in cells) / 1e6
    baseline = next((arm.median_ms for arm in arms if arm.name == BASELINE), None)
    speedups = {cell.arm: cell.speedup for cell in cells}
    limit = None if baseline is None else baseline / least_ms
    found = answer(speedups, limit)
    return facts.TrialFacts(
        title=f"{model}, {_cluster(first.hosts, first.ranks_per_host, first.link_bits_per_second)}{scale}",
        answer=found.sentence,
        number=found.number,
        bound=f"a step of {least_ms:.1f} ms, simulated from computing alone and the network as the run measured them",
        lines=[*run.lines, ("the least that any schedule takes, simulated", least_ms)],
        layers=run.layers,
        arms=arms,
        baseline=BASELINE,
        recommended=found.arm,
        limit=limit,
        remarks=trial_remarks(cells),
    )


def _cluster(hosts: int, ranks_per_host: int, link_bits_per_second: int | None) -> str:
    link = "links as they are" if link_bits_per_second is None else f"links of {format_rate(link_bits_per_second // 8)}"
    return f"{hosts_text(hosts, ranks_per_host)}, {link}"


def _numbers(speedup: Speedup | None) -> tuple[float, float, float] | None:
    return None if speedup is None else (speedup.ratio, speedup.low, speedup.high)


def _searches(log: SearchLog) -> list[facts.TryFacts]:
    return [
        facts.TryFacts(
            look.why, [(str(trial.choice), [took / 1e6 for took in trial.times_ns]) for trial in look.tried], look.verdict
        )
        for look in log.looks
    ]
