"""`python -m tests.live.programs`: any number of generated programs, what they came to, and the failing ones made small."""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from pathlib import Path

import click
from hypothesis import given, seed, settings
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.device.machine import Setup
from tests.live.programs import alone as by_themselves
from tests.live.programs.kept import WITHOUT
from tests.live.programs.program import Program, matches
from tests.live.programs.runner import Outcome, Runner
from tests.live.programs.shrinking import smallest, without_kinds
from tests.live.programs.strategies import GENERATED, programs

Failure = tuple[Program, Outcome]
Group = tuple[str, frozenset[str]]
KINDS = ("equal", "refused", "discarded", "differs", "raises", "hangs")


class Findings:
    """What all programs came to. Failures are grouped by how they fail and by the kinds of actions that they fail with."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.deferring = 0
        self.refusals: Counter[str] = Counter()
        self.discards: Counter[str] = Counter()
        self.first: dict[str, Program] = {}  # program, by what was said about it
        self.groups: dict[Group, list[Failure]] = defaultdict(list)

    def add(self, program: Program, outcome: Outcome) -> Group | None:
        """Notes all but failures; of those, the group that one belongs to by what it has in it, if there is one."""
        self.counts[outcome.kind] += 1
        self.deferring += any(outcome.deferred)
        if outcome.kind == "refused":
            self.refusals[outcome.about] += 1
        elif outcome.kind == "discarded":
            self.discards[outcome.about] += 1
        self.first.setdefault(outcome.about, program)
        known = [group for group in self.groups if group[0] == outcome.how and group[1] and group[1] <= program.kinds().keys()]
        return max(known, key=lambda group: len(group[1]), default=None)

    def line(self) -> str:
        return ", ".join(f"{self.counts[kind]} {kind}" for kind in KINDS)


@click.command(help=__doc__)
@click.option("--examples", default=300, show_default=True, help="How many programs.")
@click.option("--seed", "number", default=0, show_default=True, help="The same number gives the same programs.")
@click.option(
    "--without",
    default="",
    help="Leave these out: first words of actions, hooks or flags; or 'model x', 'optimizer x', 'way x'.",
)
@click.option("--device", default="cpu", show_default=True, help="On which models train; early or late: the CPU as a device.")
@click.option("--group", type=click.Choice(["gloo", "nccl"]), default="gloo", show_default=True, help="Of the ranks.")
@click.option("--ranks", default=2, show_default=True, help="Those behind the second add zeros to every gradient.")
@click.option("--known", is_flag=True, help="Leave out what is known to be open (kept.py), too.")
@click.option("--served", is_flag=True, help="Programs whose update is on the servers (gradlane.attach_to_servers).")
@click.option("--shrink/--no-shrink", default=True, help="Make one program of each group as small as it gets.")
@click.option(
    "--alone", is_flag=True, help="Each action, hook and flag by itself in a plain loop, instead of generated programs."
)
@click.option("--program", "given_programs", multiple=True, help="Run this program (JSON, or a file of one a line) instead.")
@click.option("--out", type=click.Path(path_type=Path), help="Append every failing program to this file, one a line.")
def main(
    examples: int,
    number: int,
    without: str,
    device: str,
    group: str,
    ranks: int,
    known: bool,
    served: bool,
    shrink: bool,
    alone: bool,
    given_programs: tuple[str, ...],
    out: Path | None,
) -> None:
    console = Console(soft_wrap=True, highlight=False)
    findings = Findings()
    with Runner(device, group, Setup(group, ranks, shares=True).environments if group == "nccl" else None, ranks) as runner:
        if given_programs:
            for text in _lines(given_programs):
                _show(console, runner, Program.from_json(text), shrink)
            return
        left_out = [words.strip() for words in without.split(",") if words.strip()] + [*WITHOUT] * known
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was found is told
        try:
            if alone:
                _try_alone(console, runner, findings, left_out, served, out)
            else:
                _run(console, runner, findings, examples, number, left_out, served, out)
        except KeyboardInterrupt:
            shrink = False
        _tell(console, runner, findings, shrink)
    if any(findings.counts[kind] for kind in ("differs", "raises", "hangs")):
        raise SystemExit(1)


def _lines(given_programs: tuple[str, ...]) -> list[str]:
    return [
        line for text in given_programs for line in ([text] if text.startswith("{") else Path(text).read_text().splitlines())
    ]


def _show(console: Console, runner: Runner, program: Program, shrink: bool) -> None:
    outcome = runner.run(program)
    if shrink and outcome.bad:
        program, outcome = smallest(program, outcome, runner.run)
    console.print(f"{outcome.kind}  {outcome.about}\n{outcome.trace}{program.json()}", markup=False)


def _run(
    console: Console,
    runner: Runner,
    findings: Findings,
    examples: int,
    number: int,
    without: list[str],
    served: bool,
    out: Path | None,
) -> None:
    with _progress(console) as progress:
        task = progress.add_task("programs", total=examples)

        @seed(number)
        @settings(GENERATED, max_examples=examples)
        @given(programs(without, served))
        def each(program: Program) -> None:
            outcome = runner.run(program)
            group = findings.add(program, outcome)
            if outcome.bad:
                _leave(out, program)
                if group is None:
                    smaller, seen = without_kinds(program, outcome, runner.run)
                    group = (seen.how, frozenset(smaller.kinds()))
                    findings.groups[group].insert(0, (smaller, seen))
                    console.print(f"{escape(_title(group))}: {escape(seen.about[:300])}\n    {escape(program.json())}")
                else:
                    findings.groups[group].append((program, outcome))
            progress.update(task, advance=1, description=findings.line())

        each()


def _try_alone(
    console: Console, runner: Runner, findings: Findings, without: list[str], served: bool, out: Path | None
) -> None:
    found = [
        program
        for program in (by_themselves.alone_served() if served else by_themselves.alone())
        if not any(matches(item, words) for item in program.items() for words in without)
    ]
    with _progress(console) as progress:
        task = progress.add_task("programs", total=len(found))
        for program in found:
            outcome = runner.run(program)
            findings.add(program, outcome)
            if outcome.bad:
                _leave(out, program)
                group = (outcome.how, frozenset(program.kinds()))
                if group not in findings.groups:
                    console.print(f"{escape(_title(group))}: {escape(outcome.about[:300])}\n    {escape(program.json())}")
                findings.groups[group].append((program, outcome))
            progress.update(task, advance=1, description=findings.line())


def _progress(console: Console) -> Progress:
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    return Progress(*columns, console=console)


def _leave(out: Path | None, program: Program) -> None:
    if out is not None:
        with out.open("a") as file:
            file.write(program.json() + "\n")


def _title(group: Group) -> str:
    return f"{group[0]} with {', '.join(sorted(group[1])) or 'nothing unusual'}"


def _tell(console: Console, runner: Runner, findings: Findings, shrink: bool) -> None:
    for group, failures in sorted(findings.groups.items(), key=lambda item: -len(item[1])):
        console.rule(escape(f"{_title(group)}: {len(failures)} programs"))
        program, outcome = min(failures, key=lambda failure: len(failure[0].json()))
        if shrink:
            program, outcome = smallest(program, outcome, runner.run)
        console.print(f"{outcome.about[:1000]}\n{outcome.trace[-1500:]}{program.json()}", markup=False)
    for title, texts in (("refused", findings.refusals), ("discarded", findings.discards)):
        if texts:
            console.rule(title)
        for text, count in texts.most_common(20):
            console.print(f"{count:5}  {text}\n       {findings.first[text].json()}", markup=False)
    console.rule()
    total = sum(findings.counts.values())
    console.print(f"{total} programs: {findings.line()}; {findings.deferring} deferred updates")


if __name__ == "__main__":
    main()
