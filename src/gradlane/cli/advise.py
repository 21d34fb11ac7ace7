"""`gradlane advise`: what scheduling would bring to a training script, measured while it trains under its own DDP."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

import click
import msgspec
from msgspec import structs
from rich.table import Table
from rich.text import Text

from gradlane.cli import reports
from gradlane.cli.inputs.cases import message_cost
from gradlane.cli.inputs.types import SCRIPT, SECONDS, whole_number
from gradlane.cli.terminal import console, print_table
from gradlane.compare.memory import need_memory
from gradlane.compare.processes import TIMED_OUT, need_torch, run_quietly, torchrun_here
from gradlane.core.fields import MAX_RATE
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.records.ddp_run import DdpRun
from gradlane.core.timeline import Timeline
from gradlane.errors import JobError, RunError, UnsupportedError
from gradlane.lifetime import scratch_folder
from gradlane.planning.advice import BASELINE, SAME, WORTH, Advice, Option, advise
from gradlane.planning.stock_ddp import ddp_kwargs
from gradlane.report.page import facts
from gradlane.report.page.drawing import draw, draw_simulated, parts_of, quantile, typical_iterations
from gradlane.report.page.simulated import simulated_arm
from gradlane.sim import simulate
from gradlane.units import format_bytes, format_ns, format_rate


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--nproc", type=whole_number(2), default=2, show_default=True, help="Worker processes on this host.")
@click.option("--steps", type=whole_number(4), default=10, show_default=True, help="Steps to measure as they are.")
@click.option(
    "--timeout", type=SECONDS, default=600.0, show_default=True, help="Seconds that SCRIPT may take to get through them."
)
@reports.option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and what SCRIPT prints on stderr.")
@click.argument("script", type=SCRIPT)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    nproc: int, steps: int, timeout: float, report: Path | None, as_json: bool, script: str, arguments: tuple[str, ...]
) -> None:
    """Run SCRIPT, which trains under torch's DistributedDataParallel, for some steps; say what scheduling would bring.

    SCRIPT needs no change, and is ended after 1.5 * STEPS steps and a few more. In the last of them no gradients are
    summed: what it trained is of no use, so do not let it overwrite a checkpoint.

    Where RANK and WORLD_SIZE are set this is one rank of a job that something else starts: torchrun --no-python on
    several hosts, srun, or gradlane lab. Rank 0 says what was found.

    \b
    gradlane advise --nproc 2 train.py --epochs 1
    gradlane lab --hosts 2 --link 100mbit -- gradlane advise train.py
    torchrun --no-python --nnodes 2 --rdzv-endpoint host0:29400 gradlane advise train.py
    """
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    need_torch("advise")
    need_memory("--nproc", 1 if is_rank else nproc)
    with scratch_folder() as scratch:
        exit_code = _run(Path(scratch), is_rank, nproc, steps, timeout, as_json, script, arguments)
        if is_rank and os.environ["RANK"] != "0":
            click.get_current_context().exit(exit_code)
        run = _measured(Path(scratch), exit_code, timeout)
    advice = advise(run)
    if report is not None:
        reports.write(report, "gradlane advise", [_trial(advice)])
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(_record(advice)), indent=2).decode())
    else:
        _show(advice)


def _run(
    scratch: Path,
    is_rank: bool,
    nproc: int,
    steps: int,
    timeout_s: float,
    as_json: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Start the ranks, or the one that this process stands for, and wait for them; returns the exit code."""
    worker = ["-m", "gradlane.live.ddp.watch", str(scratch), str(steps), script, *arguments]
    command = [sys.executable, *worker] if is_rank else [*torchrun_here(nproc), *worker]
    # what is advised is on stdout alone
    return run_quietly(command, os.environ, sys.stderr.fileno() if as_json else None, timeout_s)


def _measured(scratch: Path, exit_code: int, timeout_s: float) -> DdpRun:
    """What the ranks left. Once that is whole it does not matter how they ended."""
    run, why_not = scratch / "run.json", scratch / "why-not.txt"
    if run.exists():
        return DdpRun.from_json(run.read_bytes())
    if why_not.exists():
        raise UnsupportedError(f"advise: nothing was measured: {why_not.read_text()}")
    if exit_code == TIMED_OUT:
        raise JobError(
            f"advise: no end of the steps within {timeout_s:g} s; give the script more (--timeout), or fewer --steps"
        )
    raise RunError.of("the script", exit_code or 1)


# -- what is said ---------------------------------------------------------------------------------------------


def doubt(advice: Advice) -> str | None:
    """What to know before anything else: that the simulator is far off the measured step; None if it is not."""
    if not advice.is_doubtful:
        return None
    more = advice.off > 0
    reason = (
        "when the network was measured alone it was slower than in the steps, or the machine was busier"
        if more
        else "what summing takes from the processor is not simulated, or the machine was busy"
    )
    return (
        f"Take this as rough: DDP's step is {format_ns(advice.baseline.expected_ns)} simulated and "
        f"{format_ns(advice.step_ns)} measured, {abs(advice.off):.0%} {'more' if more else 'less'} ({reason})."
    )


_UNSTEADY = 0.25  # part of the median step by which the 10th and the 90th percentile may differ without a word


def verdict(advice: Advice) -> str:
    """In a few short sentences: whether scheduling is worth it here."""
    best, step = advice.best, format_ns(advice.step_ns)
    adds = f"summing gradients adds {advice.costs:.1%} to your step of {step}"
    if advice.costs >= 0.1:
        adds = f"summing gradients takes {advice.costs:.0%} of your step of {step}"
    if advice.is_refuted:
        return (
            f"No conclusion: no schedule takes less than {format_ns(advice.bound_ns)} as simulated, and your step took {step}. "
            "The steps and the network were not measured under the same load; measure again, with more --steps."
        )
    if advice.is_worth_it:
        saves = f"{best.policy} would save {advice.saves:.0%} of the step"
        return f"{adds.capitalize()}. {saves}, and no schedule can save more than {advice.possible:.1%} (simulated)."
    if advice.costs < WORTH:
        return f"Nothing to gain here: {adds}."
    if advice.hidable >= WORTH:
        saves = f"the best policy, {best.policy}, would save {advice.saves:.1%}"
        return (
            f"Little to gain here: {adds}. No schedule can save more than {advice.possible:.1%} of it, and {saves} (simulated)."
        )
    if advice.is_bound_by_network:
        halved = format_ns(advice.halved_bound_ns)
        return (
            f"Little to gain by scheduling: {adds}, since the bytes take longer than there is computing to hide them behind. "
            f"With gradients as bfloat16 (wire_dtype) a step takes {halved} at the "
            "least (simulated); larger batches, or sums every other batch, would help too."
        )
    return (
        f"Nothing to gain here: {adds}, but hardly by waiting, as simulated: it takes its time from the processor, which no "
        "schedule gives back."
    )


def unknown(advice: Advice) -> list[str]:
    """What was not measured, and what to doubt."""
    run = advice.run
    said = [
        "policies over gradlane's own servers: their network is measured by gradlane.attach, and auto tries them",
        "what the script does outside of its passes and optimizers counts as computing before the forward pass",
    ]
    low_ns, high_ns = quantile(run.step_ns, 0.1), quantile(run.step_ns, 0.9)
    if high_ns - low_ns > _UNSTEADY * advice.step_ns:
        said.append(
            f"steps took from {format_ns(round(low_ns))} to {format_ns(round(high_ns))} (p10 to p90): a busy machine, or steps "
            "that differ; more --steps tell more"
        )
    if advice.alone_ns > (1 + WORTH) * advice.step_ns:
        said.append(
            f"steps without sums took {format_ns(advice.alone_ns)}, longer than those with sums: the machine was busy then, "
            "or it computes at a changing rate"
        )
    if advice.waits_ns is None:
        said.append("how long a backward pass waits for its last sums: on a device the host does not see it")
    if run.hook:
        said.append(f"the script's communication hook {run.hook}: options sum gradients as they are")
    elif run.plan is None:
        said.append("DDP's own buckets: on a device they are taken to be the default ones")
    if run.reads:
        clips = "clips gradients" + (" by their norm" if run.norm is not None else "")
        does = " and ".join(["has a GradScaler"] * run.scales + [clips] * run.clips)
        if run.norm is not None:
            said.append(f"the script {does}, so that of all options only `owners` defers updates")
        else:
            said.append(f"the script {does}, which needs all sums before the step: no option defers updates")
    else:
        said.append("whether the script reads gradients before the step otherwise; then no update can be deferred")
    if run.reads_parameters:
        said.append(
            "the script reads its parameters after each step, as an average of weights does: all options are simulated to wait "
            "for all sums then, though each parameter waits for its own alone"
        )
    if run.others:
        said.append(f"{run.others} more models of the script under DDP; this is about {run.model}, the first that trained")
    return said


def _lines(advice: Advice) -> list[str]:
    """What to add to the script, or to its command line."""
    best = advice.best
    lines = [
        "in place of DistributedDataParallel(model):",
        "    import gradlane",
        f'    gradlane.attach(model, optimizer)  # finds the best policy; or policy="{best.policy}"',
        "or with the script as it is: gradlane launch --ddp in place of torchrun",
    ]
    kept = advice.best_by_ddp
    if kept is not None:
        lines += [
            f"or in stock DDP, for {kept.saves:.0%} of the step:",
            *(f"    {line}" for line in ddp_kwargs(kept.plan).splitlines()),
        ]
    return lines


def rows(advice: Advice) -> list[tuple[tuple[str, ...], bool]]:
    """The table's rows, each with whether the best policy is in it. Policies that would have the same cells share a row."""
    shared: dict[tuple[str, ...], list[Option]] = {}
    for option in advice.options:
        is_own = option.policy == BASELINE
        saves = "-" if is_own else f"{format_ns(round(option.saves * advice.step_ns))} ({option.saves:.1%})"
        cells = (format_ns(option.expected_ns), saves, "yes" if option.by_ddp else "no", BASELINE if is_own else "")
        shared.setdefault(cells, []).append(option)
    found: list[tuple[tuple[str, ...], bool]] = []
    for (took, saves, by_ddp, own), options in shared.items():
        counts = sorted({option.messages for option in options})
        messages = str(counts[0]) if len(counts) == 1 else f"{counts[0]}..{counts[-1]}"
        names = f"{own}, as it is" if own else ", ".join(option.policy for option in options)
        found.append(((names, took, saves, messages, by_ddp), advice.best in options))
    return found


def _rate(network: Network) -> str:
    if network.bytes_per_second < MAX_RATE:
        return format_rate(network.bytes_per_second)
    return "a rate that cannot be told apart from none (a busy machine, or too little to send)"


def _show(advice: Advice) -> None:
    run, shown = advice.run, console()

    def say(text: str) -> None:
        shown.print(Text(text), soft_wrap=True)

    rough = doubt(advice)
    if rough is not None:
        say(f"{rough}\n")
    say(f"{run.model} on {run.workers} ranks, {format_bytes(run.profile.size_bytes)} of gradients")
    waits = "" if advice.waits_ns is None else (
        f"; its backward pass waits {format_ns(advice.waits_ns)} ({advice.waits_ns / advice.step_ns:.0%}) for the last sums"
    )  # fmt: skip
    say(f"a step takes {format_ns(advice.step_ns)} under DDP and {format_ns(advice.alone_ns)} without sums{waits}")
    network = run.network
    say(f"the network: {message_cost(network)} for a message and {_rate(network)}, measured")
    say("")
    if advice.differs:
        table = Table()
        table.add_column("policy")
        for heading in ("step, simulated", "saves of your step", "messages", "in stock DDP"):
            table.add_column(heading, justify="right")
        for cells, is_best in rows(advice):
            table.add_row(*(Text(cell) for cell in cells), style="bold green" if is_best else None)
        print_table(table)
    else:
        say(
            f"No policy's simulated step differs from DDP's {format_ns(advice.baseline.expected_ns)} by {SAME:.0%} of your "
            "step or more."
        )
    say(f"no schedule takes less than {format_ns(advice.bound_ns)}, simulated")
    if advice.has_capped_savings:
        say(f"savings end at {advice.possible:.1%}, which is what that bound leaves of your step as it was measured")
    say("")
    say(verdict(advice))
    if advice.is_worth_it:
        say("\n" + "\n".join(_lines(advice)))
    say("\nnot measured, or to be doubted:\n" + "\n".join(f"- {line}" for line in unknown(advice)))


def _trial(advice: Advice) -> facts.TrialFacts:
    """For a report: DDP as it was measured, and every option as it was simulated."""
    run, baseline = advice.run, advice.baseline
    arms = []
    for option in advice.options:
        profile = advice.profile.in_order_of(option.plan.tensors)
        seen = simulate(option.plan, profile, run.network)
        arm = simulated_arm(option.policy, option.plan, seen, profile, option.expected_ns, advice.bound_ns, None, [2])
        faster = 1 / (1 - option.saves)  # than the measured step, as in the text
        assert arm.parts is not None
        # what messages take from computing, which the simulation does not have
        other = arm.parts.other + (option.expected_ns - option.iteration_ns) / 1e6
        arm = structs.replace(arm, speedup=(faster, faster, faster), parts=structs.replace(arm.parts, other=other))
        arms.append(_as_measured(arm, run, option.plan, profile, seen) if option is baseline else arm)
    alone_ms, bound_ms = advice.alone_ns / 1e6, advice.bound_ns / 1e6
    return facts.TrialFacts(
        title=f"{run.model} on {run.workers} ranks, {format_bytes(run.profile.size_bytes)} of gradients",
        answer=" ".join(filter(None, (doubt(advice), verdict(advice)))),
        number=f"{advice.saves:.0%}",
        bound=f"no schedule takes less than {format_ns(advice.bound_ns)}, simulated",
        lines=[("without sums, measured", alone_ms), ("the least that any schedule takes, simulated", bound_ms)],
        layers=[layer.name for layer in advice.profile.layers],
        arms=sorted(arms, key=lambda arm: arm.name != BASELINE),
        baseline=BASELINE,
        recommended=advice.best.policy,
        limit=max(1.0, advice.step_ns / advice.bound_ns) if advice.bound_ns else None,
        tables=[facts.TableFacts("Not measured, or to be doubted", ["what"], [[line] for line in unknown(advice)])],
    )


def _as_measured(arm: facts.ArmFacts, run: DdpRun, plan: Plan, profile: Profile, seen: Timeline) -> facts.ArmFacts:
    """`arm` of DDP with the steps that were measured, and with what happened in some of them, if that is known."""
    steps = [took / 1e6 for took in run.step_ns]
    low_ms, high_ms = quantile(steps, 0.1), quantile(steps, 0.9)
    arm = structs.replace(arm, turns_ms=[steps], median_ms=median(steps), low_ms=low_ms, high_ms=high_ms)
    if run.timeline is None or run.plan is None:
        return arm
    iterations = typical_iterations([run.timeline])
    drawn = draw(run.plan, [run.timeline], iterations)
    drawn = structs.replace(drawn, simulated=draw_simulated(plan, seen, len(iterations)))
    return structs.replace(arm, timeline=drawn, hidden=run.timeline.hidden(), parts=parts_of(run.timeline, run.plan, profile))


def _record(advice: Advice) -> dict[str, Any]:
    """The advice for programs."""
    run, kept = advice.run, advice.best_by_ddp

    def row(option: Option) -> dict[str, Any]:
        return {
            "policy": option.policy, "iteration_ns": option.expected_ns, "saves": option.saves, "messages": option.messages,
            "by_stock_ddp": option.by_ddp,
        }  # fmt: skip

    return {
        "model": run.model,
        "workers": run.workers,
        "doubt": doubt(advice),
        "verdict": verdict(advice),
        "worth_it": advice.is_worth_it,
        "best": advice.best.policy,
        "step_ns": advice.step_ns,
        "alone_ns": advice.alone_ns,
        "waits_ns": advice.waits_ns,
        "costs": advice.costs,
        "saves": advice.saves,
        "possible": advice.possible,
        "bound_ns": advice.bound_ns,
        "measured_step_ns": run.step_ns,
        "measured_alone_ns": run.alone_ns,
        "startup_ns": run.network.startup_ns,
        "bytes_per_second": run.network.bytes_per_second,
        "policies": [row(option) for option in advice.options],
        "ddp_kwargs": None if kept is None else ddp_kwargs(kept.plan),
        "not_measured": unknown(advice),
    }
