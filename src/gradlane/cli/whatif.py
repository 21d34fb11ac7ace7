"""`gradlane whatif`: how much bandwidth, how many workers, which partition size, a faster card or bus; by simulation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from msgspec import UNSET
from rich.table import Table
from rich.text import Text

from gradlane.cli import reports
from gradlane.cli.inputs import completion
from gradlane.cli.inputs.cases import (
    AS_MANY,
    PLACE_OPTIONS,
    RATES,
    WORKERS,
    Place,
    Workers,
    cases,
    parse_rates,
    parse_workers,
    place_options,
    read_place,
    workers_of,
)
from gradlane.cli.inputs.computing import PROFILE_HELP, Computing, computing_options
from gradlane.cli.inputs.faults import naming
from gradlane.cli.inputs.knobs import read_policies
from gradlane.cli.inputs.progress import bar
from gradlane.cli.inputs.types import FACTOR, PLOT_FILE, Checked, number_of
from gradlane.cli.reports import BASELINE
from gradlane.cli.simulate import json_text, rate_text, row
from gradlane.cli.terminal import console, print_table
from gradlane.core import files
from gradlane.core.policy import Policy
from gradlane.core.profile import Profile
from gradlane.errors import InputError
from gradlane.planning import catalog
from gradlane.planning.advice import SAME
from gradlane.planning.questions import Case, Outcome, Refusal, knob_grid, needed_rates, sweep
from gradlane.planning.questions.whatif import Needed
from gradlane.planning.search.space import with_knobs
from gradlane.report import plots
from gradlane.report.page import facts
from gradlane.report.page.simulated import Lines, charts
from gradlane.units import MAX_RATE, counted, format_bytes, format_ns, format_rate, format_share, parse_bytes

_policies = click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME[:KNOB=VALUE]",
    shell_complete=completion.policies,
    help="Only this one, as in bytescheduler:partition_bytes=4MiB; may be repeated.",
)


def _target(text: str) -> float:
    target = number_of(text)
    if not 0 < target < 1:
        raise InputError(f"got {text!r}, expected a part of linear scaling between 0 and 1, as in 0.9 or 90%")
    return target


_TARGET = Checked("part", _target)
_DECADES = "100mbit,200mbit,500mbit,1gbit,2gbit,5gbit,10gbit,20gbit,50gbit,100gbit"
NO_MORE = "no more than"
_SIZES = "256KiB,512KiB,1MiB,2MiB,4MiB,8MiB,16MiB,32MiB"


@click.group()
def command() -> None:
    """Ask the simulator: how much bandwidth, how many workers, which partition size, a faster card or bus.

    \b
    gradlane whatif bandwidth vgg16 --servers same
    gradlane whatif workers resnet50 --workers 4..2048
    gradlane whatif faster resnet152 --workers 16x8
    """


@dataclass(frozen=True)
class _Question:
    """The options that all questions share.

    Args:
        profile: the profile that is asked about.
        there: the network, without its rate and number of workers.
        rates: of links, in bits per second, ascending.
        counts: hosts and devices, by ascending numbers of workers, and of hosts where these are equal.
        jitter: standard deviation of a device's step, as a part of it.
        clips: as in `Case`.
        as_json: print JSON instead of a table.
        plot: the file to draw into; None to draw nothing.
    """

    profile: Profile
    there: Place
    rates: list[int]
    counts: list[Workers]
    jitter: float
    clips: float | None
    as_json: bool
    plot: Path | None
    report: Path | None

    def draw(
        self,
        answer: str,
        remarks: list[str],
        headings: list[str],
        rows: list[list[str]],
        lines: Lines,
        x: str,
        y: str,
        *,
        log_x: bool = False,
    ) -> None:
        """Draw the answer into the files that were asked for.

        Args:
            answer: in one sentence, with which a report opens.
            remarks: what to know beside.
            headings, rows: the answer as a table of text.
            lines: by name; none where its x are no numbers.
            x, y: of the axes.
            log_x: factors of x are as wide everywhere.
        """
        panels = {self.title: lines} if lines else {}
        if self.plot is not None:
            with files.writing(self.plot):
                plots.draw(self.plot, panels, x, y, log_x=log_x)
        if self.report is not None:
            table = facts.TableFacts("All answers", headings, rows)
            trial = reports.of_lines(self.title, answer, charts(panels, x, y, log_x=log_x), [table], remarks)
            reports.write(self.report, "gradlane whatif", [trial])

    @property
    def is_drawn(self) -> bool:
        return self.plot is not None or self.report is not None

    @property
    def rate(self) -> int:
        if len(self.rates) != 1:
            raise InputError(f"--rate: got {len(self.rates)} rates, expected one; gradlane simulate takes several")
        return self.rates[0]

    @property
    def count(self) -> Workers:
        if len(self.counts) != 1:
            raise InputError(f"--workers: got {len(self.counts)} numbers, expected one")
        return self.counts[0]

    @property
    def title(self) -> str:
        there = self.there
        flat = there.flat and any(each.devices > 1 for each in self.counts)
        algorithms = dict.fromkeys(there.algorithm_of(each) for each in self.counts)
        servers = f", {' or '.join(algorithms)} all-reduce" + (" of all devices" if flat else "")
        if there.servers is not None:
            servers = ", as many servers" if there.servers == AS_MANY else f", {there.servers} servers"
        among = "" if len(self.counts) > 1 else f", {self.counts[0]} {'workers' if self.counts[0].total > 1 else 'worker'}"
        return f"{self.profile.model}{among}{servers}"


def _question(
    *, rates: str = RATES, counts: str = WORKERS, jitter: bool = True, plot: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that makes a command of a function of a `_Question` and its own options.

    Args:
        rates: the default of --rate; empty for none.
        counts: the default of --workers.
        jitter: whether the question takes --jitter.
        plot: whether its answers lie on a scale, so that they can be drawn.
    """

    def decorate(answer: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(answer)
        def asked(
            profile_text: str, rate: tuple[str, ...], workers: tuple[str, ...], as_json: bool, report: Path | None,
            plot: Path | None = None, **own: Any,
        ) -> None:  # fmt: skip
            computing = Computing.take(own)
            there = {name: own.pop(name) for name in PLACE_OPTIONS}
            question = _Question(
                computing.read(profile_text),
                read_place(**there, device=computing.device),
                sorted(set(parse_rates(rate, rates))) if rate or rates else [],
                sorted(dict.fromkeys(parse_workers(workers, counts)), key=lambda each: (each.total, each.hosts)),
                computing.jitter,
                computing.clips,
                as_json,
                plot,
                report,
            )
            answer(question, **own)
            if not as_json:
                reports.show_misfits(console(), [profile_text], computing)

        offered: Callable[..., None] = reports.option(asked)
        if plot:
            offered = click.option("--plot", type=PLOT_FILE, help="Draw the answer (.svg, .png, .pdf).")(offered)
        offered = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")(offered)
        offered = computing_options(place_options(offered, rates=rates, workers=counts), jitter=jitter)
        return click.argument("profile_text", metavar="PROFILE", shell_complete=completion.models)(offered)

    return decorate


@command.command(epilog=PROFILE_HELP, short_help="The lowest rate of the links that reaches a target.")
@click.option(
    "--target", "targets", multiple=True, type=_TARGET, help="Part of linear scaling, as in 90%.  [default: 90% and 99%]"
)
@_policies
@_question(rates="", jitter=False)
def bandwidth(question: _Question, targets: tuple[float, ...], policies: tuple[str, ...]) -> None:
    """The least rate of the links at which each policy reaches 90 % and 99 % of linear scaling
    (Mercury Fig. 12).

    From it on, every higher rate up to 400 Gbit/s that was tried reaches it too.
    """
    if question.rates:
        raise InputError("--rate: got one, expected none: it is what is asked for")
    if question.jitter:
        raise InputError(
            f"--jitter: got {format_share(question.jitter)}, expected none: rates are searched without; gradlane whatif rates "
            "takes it"
        )
    profile, there, count = question.profile, question.there, question.count

    def at(bytes_per_second: int) -> Case:
        (case,) = cases([profile], there, [8 * bytes_per_second], [count], clips=question.clips)
        return case

    targets = targets or (0.9, 0.99)
    asked = read_policies(policies or at(10**9).policies)
    with bar() as progress:
        task = progress.add_task("simulating", total=len(asked))
        answers: list[tuple[str, float, Needed]] = []
        refusals: list[Refusal] = []
        for policy in asked:
            found = needed_rates(policy, at, targets, refuse=refusals.append)
            answers += [(catalog.spelled(policy), target, needed) for target, needed in zip(targets, found, strict=False)]
            progress.advance(task)
    if not answers:
        raise type(refusals[0].error)(f"at {rate_text(refusals[0].case)}: {refusals[0].error}")
    names = list(dict.fromkeys(name for name, _, _ in answers))
    answer = _answer_needed(answers, targets[0])
    remarks = reports.refusal_lines(refusals, 0, rate_text)
    if question.as_json:
        found_rows = (
            {"policy": name, "target": target, "bits_per_second": needed.bytes_per_second and 8 * needed.bytes_per_second,
             "reached": needed.reached, "is_lowest_tried": needed.is_lowest_tried}
            for name, target, needed in answers
        )  # fmt: skip
        click.echo(json_text(found_rows, refusals))
    else:
        _open(answer)
        _show_needed(answers, names, targets, question.title)
        reports.show_lines(console(), remarks)
    if question.is_drawn:
        lines = {
            name: [
                (100 * target, 8 * needed.bytes_per_second / 1e9)
                for policy, target, needed in answers
                if policy == name and needed.bytes_per_second is not None
            ]
            for name in names
        }
        rows = [[name, format_share(target), _needed_text(needed)] for name, target, needed in answers]
        headings = ["policy", "of linear", "least rate"]
        question.draw(answer, remarks, headings, rows, lines, "% of linear scaling", "Gbit/s needed")


@command.command(epilog=PROFILE_HELP, short_help="Scaling against the rate of the links.")
@_policies
@_question(rates=_DECADES)
def rates(question: _Question, policies: tuple[str, ...]) -> None:
    """Scaling against the rate of the links (Geryon Fig. 4b, Mercury Fig. 11)."""
    todo = cases([question.profile], question.there, question.rates, [question.count], question.jitter, question.clips)
    _against(question, todo, policies, "bits_per_second")


@command.command(epilog=PROFILE_HELP, short_help="Scaling against the number of workers.")
@click.option("--target", type=_TARGET, help="Also say up to how many workers this part of linear scaling is kept.")
@_policies
@_question(counts="2..2048")
def workers(question: _Question, target: float | None, policies: tuple[str, ...]) -> None:
    """Scaling against the number of workers (MG-WFBP Figs. 10, 11)."""
    todo = cases([question.profile], question.there, [question.rate], question.counts, question.jitter, question.clips)
    _against(question, todo, policies, "workers", target)


@command.command(epilog=PROFILE_HELP, short_help="What a faster card, bus or both would bring.")
@click.option("--times", type=FACTOR, default=2.0, show_default=True, help="How many times as fast.")
@click.option("--halves", is_flag=True, help="And what gradients that travel as bfloat16 would bring.")
@_policies
@_question(counts="16x8", plot=False)
def faster(question: _Question, times: float, halves: bool, policies: tuple[str, ...]) -> None:
    """What a faster network card, a faster bus between the devices of a host, or both would bring."""
    if question.count.devices == 1:
        raise InputError(f"--workers: got {question.count}, expected hosts of several devices, as in 16x8; see whatif rates")
    if halves and question.profile.wire_dtype is not UNSET:
        raise InputError("--halves: got it with --wire-dtype, expected one or the other: gradients travel as halves already")
    there, rate = question.there, question.rate
    if there.flat and there.servers is not None:
        raise InputError("--flat: got it with --servers, where nothing is summed over the bus; expected one or the other")
    for each in (rate // 8, there.bus.bytes_per_second):
        if not 1 <= each * times <= MAX_RATE:
            raise InputError(
                f"--times: got {times:g}, expected a factor with which links and bus stay between {format_rate(1)} and "
                f"{format_rate(MAX_RATE)}"
            )
    card, bus = f"card x {times:g}", f"bus x {times:g}"
    profile, fast_bus = question.profile, there.with_bus_times(times)
    todo = {
        "now": (profile, there, rate),
        card: (profile, there, round(rate * times)),
        bus: (profile, fast_bus, rate),
        "both": (profile, fast_bus, round(rate * times)),
    }
    if halves:
        todo["halves"] = (profile.with_wire_dtype("bfloat16"), there, rate)
    changed = [
        replace(case, labels={**case.labels, "change": change})
        for change, (moved, place, bits_per_second) in todo.items()
        for case in cases([moved], place, [bits_per_second], [question.count], question.jitter, question.clips)
    ]
    _against(question, changed, policies, "change")


@command.command(epilog=PROFILE_HELP, short_help="Iteration time by partition and credit size.")
@click.option("--partition", "partitions", multiple=True, metavar="SIZE", help=f"  [default: {_SIZES}]")
@click.option("--credit", "credits", multiple=True, metavar="SIZE", help="The same as --partition by default.")
@_question()
def knobs(question: _Question, partitions: tuple[str, ...], credits: tuple[str, ...]) -> None:
    """ByteScheduler's iteration time against partition and credit size (ByteScheduler Fig. 4)."""
    (case,) = cases([question.profile], question.there, [question.rate], [question.count], question.jitter, question.clips)
    policy = catalog.get("bytescheduler")
    sizes = _sizes(policy, "partition_bytes", "--partition", partitions or (_SIZES,))
    limits = _sizes(policy, "credit_bytes", "--credit", credits) if credits else sizes
    total = sum(limit >= size for size in sizes for limit in limits)
    with bar() as progress:
        task = progress.add_task("simulating", total=total)
        refusals: list[Refusal] = []
        grid = knob_grid(policy, case, sizes, limits, lambda done: progress.advance(task, done), refusals.append)
    if not grid and refusals:
        raise refusals[0].error
    if not grid:
        raise InputError("--credit: got only sizes below every partition, expected one at least as large")
    answer = _answer_grid(grid)
    if question.as_json:
        of_sizes = ({"partition_bytes": size, "credit_bytes": limit, **row(outcome)} for size, limit, outcome in grid)
        click.echo(json_text(of_sizes, refusals))
    else:
        _open(answer)
        _show_grid(grid, sizes, limits, question.title)
        reports.show_lines(console(), reports.refusal_lines(refusals))
    if question.is_drawn:
        lines = {
            f"credit {format_bytes(limit)}": [
                (size / 2**20, o.iteration_ns / 1e6) for size, credit, o in grid if credit == limit
            ]
            for limit in limits
        }
        texts = [[format_bytes(size), format_bytes(limit), format_ns(o.iteration_ns)] for size, limit, o in grid]
        headings, remarks = ["partition", "credit", "iteration"], reports.refusal_lines(refusals)
        question.draw(answer, remarks, headings, texts, lines, "partition, MiB", "iteration, ms", log_x=True)


def _against(question: _Question, todo: Sequence[Case], policies: Sequence[str], x: str, target: float | None = None) -> None:
    """Simulate the cases and print a row a policy and a column a value of `x`.

    Args:
        question: what was asked.
        todo: the cases.
        policies: names; none for all that can run.
        x: the label that tells the cases apart.
        target: say up to which case this part of linear scaling is kept; None not to.
    """
    asked = read_policies(policies) or None
    with bar() as progress:
        task = progress.add_task("simulating", total=sum(len(asked or case.policies) for case in todo))
        refusals: list[Refusal] = []
        outcomes = sweep(todo, asked, lambda done: progress.advance(task, done), refusals.append)
    names = tuple(dict.fromkeys(outcome.policy for outcome in outcomes))
    answer = _answer(outcomes, x) if target is None else f"{_answer_target(outcomes, x, target)} {_answer(outcomes, x)}"
    remarks = [*reports.baseline_line(outcomes), *reports.refusal_lines(refusals, len(todo), lambda case: _named(case, x))]
    if question.as_json:
        click.echo(json_text(map(row, outcomes), refusals))
    else:
        _open(answer)
        _show(outcomes, names, x, question.title)
        reports.show_lines(console(), remarks)
    if question.is_drawn:
        scale = 1e9 if x == "bits_per_second" else 1
        lines: dict[str, list[tuple[float, float]]] = {}
        for hosts, of_hosts in () if x == "change" else reports.by_devices(outcomes).items():
            placed = [(int(o.case.labels[x]) / scale, o) for o in of_hosts]
            for name in names:
                lines[name + hosts] = [(at, 100 * o.efficiency) for at, o in placed if o.policy == name]
            bounds = {at: 100 * o.possible for at, o in placed}
            lines[NO_MORE + hosts] = list(bounds.items())
        rows = [[_HEADS[x](o.case), o.policy, format_ns(o.iteration_ns), f"{o.efficiency:.1%}"] for o in outcomes]
        one_each = {_HEADS[x](o.case): o for o in outcomes}
        rows += [[value, NO_MORE, format_ns(o.bound_ns), f"{o.possible:.1%}"] for value, o in one_each.items()]
        axis, head = ("Gbit/s", "rate") if x == "bits_per_second" else (x, x)
        headings = [head, "policy", "iteration", "scaling"]
        question.draw(answer, remarks, headings, rows, lines, axis, "% of linear scaling", log_x=True)


_HEADS: dict[str, Callable[[Case], str]] = {
    "workers": lambda case: str(workers_of(case)),
    "bits_per_second": lambda case: _rate_head(int(case.labels["bits_per_second"])),
    "change": lambda case: str(case.labels["change"]),
}


def _named(case: Case, x: str) -> str:
    """A case by what tells it from the others, in a sentence."""
    return rate_text(case) if x == "bits_per_second" else _HEADS[x](case) + (" workers" if x == "workers" else "")


def _rate_head(bits_per_second: int) -> str:
    """A rate for the head of a column: `10G`, `0.5G`, `20M`."""
    for letter, unit in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if bits_per_second >= unit / 10:
            return f"{bits_per_second / unit:g}{letter}"
    return f"{bits_per_second}"


def _open(answer: str) -> None:
    console().print(Text(answer, style="bold"), soft_wrap=True)


def _answer(outcomes: Sequence[Outcome], x: str) -> str:
    """What DDP, the best policy and any schedule reach where a schedule matters most, and where it does not matter. Where it
    matters nowhere, what DDP and any schedule reach where DDP reaches least.
    """
    head = _HEADS[x]
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(head(outcome.case), []).append(outcome)
    plain = {value: next((o for o in each if o.policy == BASELINE), each[0]) for value, each in found.items()}
    best = {value: max(each, key=lambda o: o.efficiency) for value, each in found.items()}
    gaps = {value: reports.saved_part(best[value], plain[value]) for value in found}
    if x == "change":
        now, *changes = found
        names = {outcome.policy for outcome in best.values()}
        who = f" ({best[now].policy})" if len(names) == 1 else ""
        whose = {value: "" if who else f" ({best[value].policy})" for value in found}
        reached = ", ".join(f"{best[value].efficiency:.1%} with {value}{whose[value]}" for value in changes)
        return f"The best policy{who} reaches {best[now].efficiency:.1%} of linear now{whose[now]}, {reached}."
    here = {value: _named(each[0].case, x) for value, each in found.items()}
    is_alone = len({outcome.policy for outcome in outcomes}) == 1
    nobody_saves = max(gaps.values()) <= SAME
    if is_alone:
        where = list(found)[-1]
    elif nobody_saves:
        where = min(found, key=lambda value: plain[value].efficiency)
    else:
        where = max(gaps, key=lambda value: gaps[value])
    at = f"{'with' if x == 'workers' else 'at'} {here[where]}"
    most = best[where].possible
    reached = f"{plain[where].policy} reaches {plain[where].efficiency:.0%} of linear"
    if is_alone:
        return f"{at[0].upper()}{at[1:]} {reached}, no schedule more than {most:.0%}."
    if nobody_saves:
        no_more = f"{at} {reached}, no schedule more than {most:.0%}"
        return f"No policy saves more than a percent of the time of {plain[where].policy}: {no_more}."
    ahead = f"{best[where].policy} {best[where].efficiency:.0%}, no schedule more than {most:.0%}"
    text = f"{at[0].upper()}{at[1:]} {reached}, {ahead}"
    values = list(found)
    enough = len(values)
    while enough and gaps[values[enough - 1]] <= SAME:
        enough -= 1
    if enough == len(values) or len(reports.by_devices(outcomes)) > 1:
        return f"{text}."
    return f"{text}; from {here[values[enough]]} on no policy saves more than a percent of the time of {plain[where].policy}."


def _answer_target(outcomes: Sequence[Outcome], x: str, target: float) -> str:
    """Up to which case DDP and the best policy keep a part of linear scaling, among hosts with as many devices each."""
    found = {each[0].case.labels["devices"]: _kept_up_to(each, x, target) for each in reports.by_devices(outcomes).values()}
    if len(found) == 1:
        return " ".join(found.values())
    return " ".join(
        f"With hosts of {counted(int(devices), 'devices')}, {text[0].lower()}{text[1:]}" for devices, text in found.items()
    )


def _kept_up_to(outcomes: Sequence[Outcome], x: str, target: float) -> str:
    """As `_answer_target`, of outcomes by ascending numbers of workers. Larger cases than one that fails do not count."""
    kept: dict[str, str] = {}
    lost: set[str] = set()
    for outcome in outcomes:
        if outcome.efficiency < target:
            lost.add(outcome.policy)
        elif outcome.policy not in lost:
            kept[outcome.policy] = _HEADS[x](outcome.case)
    order = list(dict.fromkeys(_HEADS[x](outcome.case) for outcome in outcomes))
    names = list(dict.fromkeys(outcome.policy for outcome in outcomes))
    plain = BASELINE if BASELINE in names else names[0]
    if not kept:
        return f"No policy reaches {format_share(target)} of linear with {order[0]} workers."
    best = max(kept, key=lambda name: (order.index(kept[name]), name == plain))
    text = (
        f"{plain} keeps {format_share(target)} of linear up to {kept[plain]} workers"
        if plain in kept
        else (f"{plain} does not keep {format_share(target)} of linear with {order[0]} workers")
    )
    return f"{text}." if best == plain or kept[best] == kept.get(plain) else f"{text}, {best} up to {kept[best]}."


def _answer_needed(answers: Sequence[tuple[str, float, Needed]], target: float) -> str:
    found = {name: needed for name, each, needed in answers if each == target}
    enough = {name: needed.bytes_per_second for name, needed in found.items() if needed.bytes_per_second is not None}
    if not enough:
        return f"No policy reaches {format_share(target)} of linear at any rate that was tried."
    plain = BASELINE if BASELINE in found else next(iter(found))
    best = min(enough, key=lambda name: (enough[name], name != plain))
    lowest = ", the lowest rate tried," if found[best].is_lowest_tried else ""
    text = f"{format_share(target)} of linear takes links of {_needed_text(found[best])}{lowest} with {best}"
    if plain == best:
        return f"{text}."
    return f"{text}, {_needed_text(found[plain])} with {plain}." if plain in enough else f"{text}; {plain} never reaches it."


def _answer_grid(grid: Sequence[tuple[int, int, Outcome]]) -> str:
    size, limit, best = min(grid, key=lambda each: each[2].iteration_ns)
    worst = max(outcome.iteration_ns for _, _, outcome in grid)
    if worst - best.iteration_ns <= SAME * best.iteration_ns:
        took = " to ".join(dict.fromkeys((format_ns(best.iteration_ns), format_ns(worst))))
        return f"Partition and credit make no difference of more than a percent: an iteration takes {took}."
    return (
        f"The best partition is {format_bytes(size)} with a credit of {format_bytes(limit)}: "
        f"{format_ns(best.iteration_ns)} an iteration, where the worst takes {format_ns(worst)}."
    )


def _show(outcomes: Sequence[Outcome], names: Sequence[str], x: str, title: str) -> None:
    head = _HEADS[x]
    values = list(dict.fromkeys(head(outcome.case) for outcome in outcomes))
    shown = console()
    shown.print(Text(f"{title}: % of linear scaling"), soft_wrap=True)
    table = Table(padding=(0, 0))
    table.add_column("policy ")
    for value in values:
        table.add_column(f" {value}", justify="right")
    best = {value: max(o.efficiency for o in outcomes if head(o.case) == value) for value in values}
    for name in names:
        mine = {head(o.case): o for o in outcomes if o.policy == name}
        cells = [
            Text(f" {100 * mine[v].efficiency:.1f}", style="bold green" if mine[v].efficiency == best[v] else "")
            if v in mine
            else Text("-")
            for v in values
        ]
        table.add_row(Text(name), *cells)
    bounds = {head(o.case): o.possible for o in outcomes}
    table.add_section()
    table.add_row(Text(NO_MORE), *(Text(f" {100 * bounds[value]:.1f}") for value in values))
    print_table(table)


def _show_needed(
    answers: Sequence[tuple[str, float, Needed]], names: Sequence[str], targets: Sequence[float], title: str
) -> None:
    shown = console()
    shown.print(Text(title), soft_wrap=True)
    table = Table()
    table.add_column("policy")
    for target in targets:
        table.add_column(f"{100 * target:g}% of linear", justify="right")
    for name in names:
        cells = [_needed_text(needed) for policy, _, needed in answers if policy == name]
        table.add_row(*(Text(cell) for cell in (name, *cells)))
    print_table(table)


def _needed_text(needed: Needed) -> str:
    if needed.bytes_per_second is None:
        return f"no rate ({needed.reached:.1%})"
    rate = format_rate(needed.bytes_per_second)
    return f"at most {rate}" if needed.is_lowest_tried else rate


def _show_grid(grid: Sequence[tuple[int, int, Outcome]], sizes: Sequence[int], limits: Sequence[int], title: str) -> None:
    best = min(outcome.iteration_ns for _, _, outcome in grid)
    shown = console()
    shown.print(Text(f"{title}: iteration by partition (down) and credit (across)"), soft_wrap=True)
    table = Table()
    table.add_column("partition", justify="right")
    for limit in limits:
        table.add_column(format_bytes(limit), justify="right")
    times = {(size, limit): outcome.iteration_ns for size, limit, outcome in grid}
    for size in sizes:
        cells = [Text(format_bytes(size))]
        for limit in limits:
            time_ns = times.get((size, limit))
            text = "" if time_ns is None else format_ns(time_ns)
            cells.append(Text(text, style="bold green" if time_ns == best else ""))
        table.add_row(*cells)
    print_table(table)


def _sizes(policy: Policy, knob: str, option: str, texts: Sequence[str]) -> list[int]:
    """The values that an option lists for a knob of a policy."""
    with naming(option):
        sizes = [parse_bytes(part) for text in texts for part in text.split(",")]
        for size in sizes:
            with_knobs(policy, {knob: size})
    return sizes
