"""`gradlane plan`: which schedule suits a profile and a network, found without running anything."""

from __future__ import annotations

from dataclasses import asdict, replace
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
    describe,
    describe_at_length,
    need_no_place,
    parse_rates,
    parse_workers,
    place_options,
    read_place,
)
from gradlane.cli.inputs.computing import PROFILE_HELP, Computing, computing_options
from gradlane.cli.inputs.knobs import parse_knobs, read_policy
from gradlane.cli.inputs.progress import bar
from gradlane.cli.inputs.types import IN_FILE, OUT_FILE, Choice
from gradlane.cli.reports import BASELINE
from gradlane.cli.terminal import console, print_table
from gradlane.core import files
from gradlane.core.network import Network
from gradlane.errors import InputError
from gradlane.planning import catalog
from gradlane.planning.advice import SAME
from gradlane.planning.questions import Case, Outcome, Refusal, judge
from gradlane.planning.questions.jitter import slowdown
from gradlane.planning.questions.memory import Replica
from gradlane.planning.searched import Searched
from gradlane.planning.stock_ddp import ddp_kwargs, why_not_ddp
from gradlane.units import counted, format_ns


@click.command(epilog=PROFILE_HELP)
@click.argument("profile_text", metavar="PROFILE", shell_complete=completion.models)
@click.argument("network_path", metavar="[NETWORK.json]", required=False, type=IN_FILE)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME[:KNOB=VALUE]",
    shell_complete=completion.policies,
    help="Plan with this policy only, beside ddp; `searched` seeks a better one. Default: all others.",
)
@click.option("--knob", "knobs", multiple=True, metavar="NAME=VALUE", help="A knob of --policy, as in partition_bytes=4MiB.")
@computing_options
@place_options
@click.option("--messages", "shows_messages", is_flag=True, help="Print the plan's messages, too.")
@click.option("--out", type=OUT_FILE, help="Write the plan as JSON.")
@reports.option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--emit", type=Choice(["ddp-kwargs"]), help="Print only what stock DDP needs to run the plan.")
def command(
    profile_text: str,
    network_path: Path | None,
    policies: tuple[str, ...],
    knobs: tuple[str, ...],
    rate: tuple[str, ...],
    workers: tuple[str, ...],
    shows_messages: bool,
    out: Path | None,
    report: Path | None,
    as_json: bool,
    emit: str | None,
    **given: Any,
) -> None:
    """Simulate every policy on PROFILE and a network, rank them, and say which is best.

    The network is a file (`gradlane probe --out` writes one) or described by --rate, --workers and so on.
    The time of an iteration is that of the steady state: from one forward pass to the next. With
    --emit ddp-kwargs and no --policy, the best among the plans that stock DDP can carry out is
    chosen.
    """
    if len(policies) > 1:
        raise InputError(f"--policy: got {' and '.join(policies)}, expected one; gradlane simulate compares several")
    policy = policies[0] if policies else None
    if knobs and policy is None:
        raise InputError("--knob: got knobs and no policy, expected --policy NAME to give them to")
    computing = Computing.take(given)
    profile = computing.read(profile_text)
    if emit is not None and as_json:
        raise InputError("--emit: got it with --json, expected one or the other; it prints Python")
    if emit is not None and shows_messages:
        raise InputError(
            "--emit: got it with --messages, expected one or the other; stock DDP's buckets are all that it prints"
        )
    if emit is not None and computing.wire_dtype is not None:
        raise InputError("--emit: got it with --wire-dtype, expected one or the other; DDP's buckets are counted in float32")
    by_all_reduce: Case | None = None
    if network_path is not None:
        if computing.jitter:
            raise InputError("--jitter: got it with a network's file, expected --rate and --workers")
        need_no_place({"rate": rate, "workers": workers, **given})
        case = Case(profile, files.read_where(network_path), clips=computing.clips)
    else:
        rates, counts = parse_rates(rate), parse_workers(workers)
        if len(rates) * len(counts) != 1:
            raise InputError("--rate, --workers: got several, expected one of each; gradlane simulate takes several")
        there = read_place(**given, device=computing.device)
        (case,) = cases([profile], there, rates, counts, computing.jitter, computing.clips)
        if there.servers is not None:
            without = replace(there, servers=None, colocated=False, flat=False)
            (by_all_reduce,) = cases([profile], without, rates, counts, computing.jitter, computing.clips)
    if policy == "auto":
        raise InputError(
            "--policy: got auto, which tries plans in a running job; expected another policy, or none: all are ranked "
            "then, as auto ranks them before it tries any"
        )
    if emit is not None and case.place.backend != "all-reduce":
        raise InputError("--emit: got it with parameter servers, expected all-reduce, which is all that stock DDP has")
    chosen = read_policy(policy, parse_knobs(knobs)) if policy is not None else None
    bound_ns = case.bound_ns
    candidates = [chosen] if chosen is not None else [catalog.get(name) for name in case.policies]
    with bar() as progress:
        task = progress.add_task("searching" if isinstance(chosen, Searched) else "simulating", total=len(candidates))
        outcomes, refusals = [], []
        for done, candidate in enumerate(candidates, 1):
            # with searched alone, its progress is the whole command's
            try:
                outcomes.append(judge(candidate, case, bound_ns, lambda part, _: progress.update(task, completed=part)))
            except InputError as error:
                refusals.append(Refusal(case, candidate.name, error))
            progress.update(task, completed=done)
    if not outcomes:
        raise refusals[0].error
    if emit is not None and chosen is None:
        outcomes = [outcome for outcome in outcomes if why_not_ddp(outcome.plan) is None]
        if not outcomes:
            raise InputError(
                "--emit ddp-kwargs: none of the plans is one that stock DDP can carry out; give --policy to hear why"
            )
    outcomes.sort(key=lambda outcome: (outcome.iteration_ns, outcome.policy != BASELINE))
    best = outcomes[0]
    baseline = next((o for o in outcomes if o.policy == BASELINE), None) or judge(catalog.get(BASELINE), case, bound_ns)
    if chosen is not None and baseline.policy != catalog.spelled(chosen):
        outcomes.append(baseline)
    torchs_ns = None if by_all_reduce is None else _torchs_ns(by_all_reduce)
    remarks = [*reports.baseline_line([baseline], torchs_ns), *reports.refusal_lines(refusals)]
    if emit is not None:
        click.echo(ddp_kwargs(best.plan))
    elif as_json:
        click.echo(_as_json(outcomes, refusals, best, baseline, torchs_ns, computing.replica(profile_text)))
    else:
        console().print(Text(_assumed(best.case, computing, profile_text)), soft_wrap=True)
        _show(outcomes, refusals, best, baseline, chosen is not None)
        reports.show_lines(console(), remarks)
        described = best.plan.describe()
        click.echo("\n" + (described if shows_messages else described.partition("\n")[0]))
        if out is None and not shows_messages:
            click.echo(_NEXT)
    if report is not None:
        answer = _recommendation(outcomes, best, baseline, chosen is not None).partition("\n")[0]
        arms = outcomes if any(outcome.policy == BASELINE for outcome in outcomes) else [*outcomes, baseline]
        reports.write(report, "gradlane plan", [reports.of_case(describe(best.case), arms, remarks, f"{answer}.", best)])
        if not as_json and emit is None:
            click.echo(f"wrote {report}")
    if out is not None:
        with files.writing(out):
            files.write(out, best.plan)
        if not as_json and emit is None:
            click.echo(f"wrote {out}")


def _torchs_ns(by_all_reduce: Case) -> int | None:
    """What a step takes under torch's DDP; None where it would take longer than what can be simulated."""
    try:
        return judge(catalog.get(BASELINE), by_all_reduce).iteration_ns
    except InputError:
        return None


def _assumed(case: Case, computing: Computing, profile_text: str) -> str:
    """What the answer assumes: model, computing, memory and network, a line each."""
    model, network = describe_at_length(case)
    profile = computing.read(profile_text)
    used = computing.utilization(profile_text, profile)
    computes = f"computes {reports.alone_text(profile, ' a step')}{'' if used is None else f', {used}'}"
    if computing.jitter:
        more = slowdown(case.workers, computing.jitter) - 1
        computes += (
            f", and {more:.1%} more with the slowest of {counted(case.workers, 'devices')} (--jitter {computing.jitter:.1%})"
        )
    if computing.clips is not None:
        computes += ", clips gradients by their norm"
    lines = [model, computes, network]
    replica = computing.replica(profile_text)
    if replica is not None:
        remedy = f"\n         {replica.remedy()}" if replica.fits is False else ""
        lines.insert(2, f"memory   {replica.describe()}{remedy}")
    return "\n".join(lines)


def _as_json(
    outcomes: list[Outcome],
    refusals: list[Refusal],
    best: Outcome,
    baseline: Outcome,
    torchs_ns: int | None,
    replica: Replica | None,
) -> str:
    rows = [
        {
            "policy": outcome.policy,
            "iteration_ns": outcome.iteration_ns,
            "speedup_over_ddp": _ratio(baseline.iteration_ns, outcome.iteration_ns),
            "efficiency": outcome.efficiency,
            "above_bound": outcome.above_bound,
            "messages": len(outcome.plan.messages),
            "hidden": None if outcome.case.is_alone else outcome.hidden(),
            "fingerprint": outcome.plan.fingerprint,
        }
        for outcome in outcomes
    ]
    text = msgspec.json.encode(
        {
            "model": best.case.profile.model,
            "workers": best.case.workers,
            "oracle_ns": best.oracle_ns,
            "bound_ns": best.bound_ns,
            "chosen": best.policy,
            "ddp_by_all_reduce_ns": torchs_ns,
            "policies": rows,
            "memory": None if replica is None else {**asdict(replica), "total": replica.total, "fits": replica.fits},
            "refused": [{"policy": refusal.policy, "reason": str(refusal.error)} for refusal in refusals],
        }
    )
    return msgspec.json.format(text, indent=2).decode()


_NEXT = (
    "next: --messages shows the plan, --out plan.json writes it for gradlane launch --plan; gradlane whatif asks how much\n"
    "      bandwidth or how many workers; gradlane compare trains under the policies on emulated hosts"
)


def _show(outcomes: list[Outcome], refusals: list[Refusal], best: Outcome, baseline: Outcome, is_given: bool) -> None:
    shown = console()
    shown.print(Text(f"\n{_recommendation(outcomes, best, baseline, is_given)}", style="bold"), soft_wrap=True)
    shown.print(
        Text(
            f"no schedule is faster than {format_ns(best.bound_ns)}; computation alone takes "
            f"{reports.alone_text(best.case.of_one)}\n"
        ),
        soft_wrap=True,
    )
    table = Table()
    table.add_column("policy")
    for heading in ("iteration", f"x {BASELINE}", "above bound", "hidden", "messages"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        cells = (
            outcome.policy,
            format_ns(outcome.iteration_ns),
            _text(_ratio(baseline.iteration_ns, outcome.iteration_ns)),
            f"{outcome.above_bound:.1%}",
            "-" if outcome.case.is_alone else f"{outcome.hidden():.0%}",
            str(len(outcome.plan.messages)),
        )
        table.add_row(*(Text(cell) for cell in cells), style="bold green" if outcome is best else None)
    for refusal in refusals:
        table.add_row(*(Text(cell) for cell in (refusal.policy, reports.CANNOT_PLAN, "-", "-", "-", "-")))
    print_table(table)


def _recommendation(outcomes: list[Outcome], best: Outcome, baseline: Outcome, is_given: bool) -> str:
    name, took = best.policy, format_ns(best.iteration_ns)
    saved = baseline.iteration_ns - best.iteration_ns
    part = _part(abs(saved), baseline.iteration_ns)
    against = f"{format_ns(abs(saved))} ({part}) {'less' if saved > 0 else 'more'} than ddp" if saved else "the same as ddp"
    if is_given:
        return f"{name}: {took} an iteration" + ("" if name == BASELINE else f", {against}")
    if best.case.is_alone:
        return f"nothing to schedule: one worker sends nothing, and an iteration takes {took}"
    if name != BASELINE and reports.saved_part(best, baseline) <= SAME:
        return (
            "nothing to gain: no policy saves more than a percent of the time of ddp, which takes "
            f"{format_ns(baseline.iteration_ns)} an iteration; {name} is the fastest, {against}"
        )
    rival = next((outcome for outcome in outcomes if outcome is not best), None)
    text = f"recommended: {name}, {took} an iteration" + (", and nothing is faster" if name == BASELINE else f", {against}")
    if rival is not None and rival.policy != BASELINE:
        gap = rival.iteration_ns - best.iteration_ns
        less = f"{format_ns(gap)} ({_part(gap, rival.iteration_ns)}) less than the next," if gap else "the same as"
        text += f", {less} {rival.policy}"
    return f"{text}\nwhy: {_why(best)}; {_why(baseline)}" if name != BASELINE else text


def _why(outcome: Outcome) -> str:
    """What a schedule pays in startups, and how long computation waits under it."""
    messages, where = outcome.plan.messages, outcome.case.where
    if isinstance(where, Network):
        path = where.path
        startup_ns = sum(sum(path.parts_ns(each.size_bytes)[:2]) for each in messages)
    else:
        startup_ns = len(messages) * where.startup_ns
    waits_ns = outcome.iteration_ns - outcome.case.profile.compute_ns
    return (
        f"{outcome.policy} pays {format_ns(startup_ns)} of startup in {counted(len(messages), 'messages')} and makes "
        f"computation wait {format_ns(waits_ns)}"
    )


def _ratio(above: int, below: int) -> float | None:
    return above / below if below > 0 else None


def _text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def _part(part_ns: int, whole_ns: int) -> str:
    return f"{part_ns / whole_ns:.1%}" if whole_ns > 0 else "-"
