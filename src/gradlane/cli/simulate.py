"""`gradlane simulate`: every policy on models, rates and cluster sizes, in simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.table import Table
from rich.text import Text

from gradlane.cli import reports
from gradlane.cli.inputs import completion
from gradlane.cli.inputs.cases import (
    cases,
    parse_rates,
    parse_workers,
    place_options,
    read_place,
    workers_of,
)
from gradlane.cli.inputs.computing import PROFILE_HELP, Computing, computing_options
from gradlane.cli.inputs.knobs import read_policies
from gradlane.cli.inputs.progress import bar
from gradlane.cli.inputs.types import OUT_FILE, PLOT_FILE
from gradlane.cli.reports import BASELINE
from gradlane.cli.terminal import console, print_table
from gradlane.core import files
from gradlane.core.profile import Profile
from gradlane.errors import InputError
from gradlane.planning.questions import Case, Outcome, Refusal, sweep
from gradlane.report import plots
from gradlane.report.page import facts
from gradlane.report.page.simulated import charts
from gradlane.report.perfetto import chrome_trace
from gradlane.units import format_ns, format_rate

SCALING = "% of linear scaling"
MOST_TIMELINES = 8  # cases whose timelines go into a report


@click.command(epilog=PROFILE_HELP)
@click.argument("profiles", metavar="PROFILE...", nargs=-1, required=True, shell_complete=completion.models)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME[:KNOB=VALUE]",
    shell_complete=completion.policies,
    help="Only this one, as in bytescheduler:partition_bytes=4MiB; may be repeated. `searched` on request.",
)
@computing_options
@place_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--out", type=OUT_FILE, help="Write the JSON to a file too.")
@click.option("--plot", type=PLOT_FILE, help="Draw the speeds (.svg, .png, .pdf).")
@reports.option
@click.option(
    "--timeline",
    type=OUT_FILE,
    help="Write what happened as a Chrome trace, of one policy on one case.",
)
def command(
    profiles: tuple[str, ...],
    policies: tuple[str, ...],
    rate: tuple[str, ...],
    workers: tuple[str, ...],
    as_json: bool,
    out: Path | None,
    plot: Path | None,
    report: Path | None,
    timeline: Path | None,
    **given: Any,
) -> None:
    """Simulate policies on models, rates and numbers of workers; prints the time of a steady iteration of each.

    \b
    gradlane simulate resnet152 --workers 2..2048
    gradlane simulate resnet152 --workers 1x8..256x8 --bus nvlink3
    gradlane simulate vgg16 bert-base --rate 1gbit,10gbit --servers same --policy mercury --policy wfbp
    """
    computing = Computing.take(given)
    read = {text: computing.read(text) for text in profiles}
    todo = cases(
        list(read.values()),
        read_place(**given, device=computing.device),
        parse_rates(rate),
        parse_workers(workers),
        computing.jitter,
        computing.clips,
        _names_of(read),
    )
    asked = read_policies(policies)
    total = sum(len(policies or case.policies) for case in todo)
    if timeline is not None and total != 1:
        raise InputError(f"--timeline: got {total} simulations, expected one policy on one model, rate and number of workers")
    with bar() as progress:
        task = progress.add_task("simulating", total=total)
        refusals: list[Refusal] = []
        outcomes = sweep(todo, asked or None, lambda done: progress.advance(task, done), refusals.append)
    text = json_text(map(row, outcomes), refusals)
    if as_json:
        click.echo(text)
    else:
        show(outcomes, refusals)
        reports.show_misfits(console(), profiles, computing)
    if out is not None:
        with files.writing(out):
            files.write_bytes(out, f"{text}\n".encode())
    if plot is not None:
        panels, x = _panels(outcomes)
        with files.writing(plot):
            plots.draw(plot, panels, x, SCALING, log_x=True)
    if report is not None:
        reports.write(report, "gradlane simulate", _trials(outcomes, refusals))
    if timeline is not None:
        trace = chrome_trace([outcomes[0].timeline()], [outcomes[0].plan])
        with files.writing(timeline):
            files.write_bytes(timeline, trace)


def _names_of(profiles: Mapping[str, Profile]) -> list[str]:
    """The models of profiles, with what was typed for each where several have one."""
    counts = Counter(profile.model for profile in profiles.values())
    return [profile.model + (f" ({text})" if counts[profile.model] > 1 else "") for text, profile in profiles.items()]


def row(outcome: Outcome) -> dict[str, Any]:
    """An outcome as a row of the JSON output."""
    return {
        **outcome.case.labels,
        "policy": outcome.policy,
        "messages": len(outcome.plan.messages),
        "iteration_ns": outcome.iteration_ns,
        "oracle_ns": outcome.oracle_ns,
        "bound_ns": outcome.bound_ns,
        "efficiency": outcome.efficiency,
        "above_bound": outcome.above_bound,
        "fingerprint": outcome.plan.fingerprint,
    }


def json_text(rows: Iterable[dict[str, Any]], refusals: Iterable[Refusal]) -> str:
    """The JSON output.

    Args:
        rows: what was simulated.
        refusals: policies that cannot plan, which are apart from the rows.
    """
    refused = [{**each.case.labels, "policy": each.policy, "reason": str(each.error)} for each in refusals]
    return msgspec.json.format(msgspec.json.encode({"rows": list(rows), "refused": refused}), indent=2).decode()


def show(outcomes: Sequence[Outcome], refusals: Sequence[Refusal] = ()) -> None:
    """Print a table with a row an outcome and the best of each case marked; what all cases share
    is printed above it.
    """
    texts = {heading: [text(outcome.case) for outcome in outcomes] for heading, text in _LABELS.items()}
    varying = [heading for heading, column in texts.items() if len(set(column)) > 1]
    shared = ", ".join(
        f"{column[0]} {heading.removesuffix('s') if column[0] == '1' else heading}".removesuffix(" model")
        for heading, column in texts.items()
        if heading not in varying
    )
    shown = console()
    if shared:
        shown.print(Text(shared), soft_wrap=True)
    table = Table()
    for heading in (*varying, "policy"):
        table.add_column(heading, justify="right" if heading == "workers" else "left")
    for heading in ("iteration", f"x {BASELINE}", "scaling", "above bound"):
        table.add_column(heading, justify="right")
    for of_case in _by_case(outcomes):
        best = min(outcome.iteration_ns for outcome in of_case)
        baseline = next((outcome.iteration_ns for outcome in of_case if outcome.policy == BASELINE), None)
        for number, outcome in enumerate(of_case):
            cells = (
                *("" if number else _LABELS[heading](outcome.case) for heading in varying),
                outcome.policy,
                format_ns(outcome.iteration_ns),
                f"{baseline / outcome.iteration_ns:.3f}" if baseline and outcome.iteration_ns else "-",
                f"{outcome.efficiency:.1%}",
                f"{outcome.above_bound:.1%}",
            )
            table.add_row(*(Text(cell) for cell in cells), style="bold green" if outcome.iteration_ns == best else None)
        for refusal in refusals:
            if refusal.case is of_case[0].case:
                cells = (*("" for _ in varying), refusal.policy, reports.CANNOT_PLAN, "-", "-", "-")
                table.add_row(*(Text(cell) for cell in cells))
        table.add_section()
    print_table(table)
    reports.show_lines(shown, reports.refusal_lines(refusals, _cases_in(outcomes, refusals), _title))
    reports.show_lines(shown, reports.baseline_line(outcomes))
    shown.print(Text("scaling: the part of linear. above bound: how much longer than the bound, which no schedule can beat."))
    profiles = {str(outcome.case.labels["model"]): outcome.case.of_one for outcome in outcomes}
    for model, profile in profiles.items():
        if profile.uncovered_ns:
            shown.print(Text(f"{model}: computation alone takes {reports.alone_text(profile)}"), soft_wrap=True)


def rate_text(case: Case) -> str:
    """The rate of a case's links, for people."""
    return format_rate(int(case.labels["bits_per_second"]) // 8)


_LABELS: dict[str, Callable[[Case], str]] = {
    "model": lambda case: str(case.labels["model"]),
    "rate": rate_text,
    "workers": lambda case: str(workers_of(case)),
}


def _title(case: Case) -> str:
    return f"{', '.join(text(case) for text in _LABELS.values())} workers"


def _cases_in(outcomes: Sequence[Outcome], refusals: Sequence[Refusal]) -> int:
    return len({id(outcome.case) for outcome in outcomes} | {id(refusal.case) for refusal in refusals})


def _by_case(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    groups: list[list[Outcome]] = []
    for outcome in outcomes:
        if groups and groups[-1][0].case is outcome.case:
            groups[-1].append(outcome)
        else:
            groups.append([outcome])
    return groups


def _trials(outcomes: Sequence[Outcome], refusals: Sequence[Refusal]) -> list[facts.TrialFacts]:
    """For a report: of several cases all rows and their lines, and each case with its timelines if there are few."""
    of_cases = _by_case(outcomes)
    trials = []
    for case, of_case in ((of_case[0].case, of_case) for of_case in of_cases[:MOST_TIMELINES]):
        refused = [refusal for refusal in refusals if refusal.case is case]
        trials.append(
            reports.of_case(_title(case), of_case, [*reports.baseline_line(of_case), *reports.refusal_lines(refused)])
        )
    if len(of_cases) == 1:
        return trials
    panels, x = _panels(outcomes)
    rows = [
        [
            *(text(o.case) for text in _LABELS.values()),
            o.policy,
            format_ns(o.iteration_ns),
            f"{o.efficiency:.1%}",
            f"{o.above_bound:.1%}",
        ]
        for o in outcomes
    ]
    table = facts.TableFacts("All cases", [*_LABELS, "policy", "iteration", "scaling", "above bound"], rows)
    left_out = len(of_cases) - len(trials)
    more = f" Timelines are shown of the first {MOST_TIMELINES}; {left_out} are left out." if left_out else ""
    answer = f"{len(of_cases)} cases, simulated. Scaling is the part of linear.{more}"
    remarks = reports.baseline_line(outcomes) + reports.refusal_lines(refusals, _cases_in(outcomes, refusals), _title)
    return [reports.of_lines("all cases", answer, charts(panels, x, SCALING, log_x=True), [table], remarks), *trials]


def _panels(outcomes: Sequence[Outcome]) -> tuple[dict[str, dict[str, list[tuple[float, float]]]], str]:
    """Lines of scaling against the rate, if there are several rates and one number of workers; else against the number
    of workers. With the name of the x axis.
    """
    counts = {outcome.case.workers for outcome in outcomes}
    against_rate = len(counts) == 1 and len({outcome.case.labels["bits_per_second"] for outcome in outcomes}) > 1
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for hosts, of_hosts in reports.by_devices(outcomes).items():
        for outcome in of_hosts:
            title = str(outcome.case.labels["model"]) + ("" if against_rate else f", {rate_text(outcome.case)}")
            x = int(outcome.case.labels["bits_per_second"]) / 1e9 if against_rate else outcome.case.workers
            panels.setdefault(title, {}).setdefault(outcome.policy + hosts, []).append((x, 100 * outcome.efficiency))
    return panels, "Gbit/s" if against_rate else "workers"
