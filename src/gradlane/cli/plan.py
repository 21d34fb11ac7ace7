"""`gradlane plan`: which schedule suits a profile and a network, found without running anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradlane import policies
from gradlane.core import files
from gradlane.core.checks import check_plan, check_timeline
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.errors import InputError
from gradlane.sim import planned_ahead, simulate
from gradlane.tune import catalog
from gradlane.units import format_bytes, format_ns, format_rate, parse_bytes

BASELINE = "ddp"
MIB = 2**20


class Outcome(NamedTuple):
    """A plan with its order fixed, and what the simulation said of it."""

    plan: Plan
    iteration_ns: int
    hidden: float


@click.command()
@click.argument("profile_path", metavar="PROFILE.json", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("network_path", metavar="NETWORK.json", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--policy", help="Plan with this policy only, beside ddp; `searched` seeks a better one. Default: all others.")
@click.option("--knob", "knobs", multiple=True, metavar="NAME=VALUE", help="A knob of --policy, as in partition_bytes=4MiB.")
@click.option("--out", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="Write the plan as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--emit", type=click.Choice(["ddp-kwargs"]), help="Print only what stock DDP needs to run the plan.")
def command(
    profile_path: Path,
    network_path: Path,
    policy: str | None,
    knobs: tuple[str, ...],
    out: Path | None,
    as_json: bool,
    emit: str | None,
) -> None:
    """Simulate every policy on PROFILE and NETWORK, rank them, and print the best plan.

    The time of an iteration is that of the steady state: from one forward pass to the next. With --emit ddp-kwargs and
    no --policy, the best among the plans that stock DDP can carry out is chosen.
    """
    if knobs and policy is None:
        raise InputError("--knob: got knobs and no policy, expected --policy NAME to give them to")
    profile, network = files.read(profile_path, Profile), files.read(network_path, Network)
    chosen = catalog.get(policy, **_knobs(knobs)) if policy is not None else None
    candidates = [chosen] if chosen is not None else [policies.get(name) for name in policies.names("all-reduce")]
    outcomes = [_outcome(candidate, profile, network) for candidate in candidates]
    if emit is not None and chosen is None:
        outcomes = [outcome for outcome in outcomes if why_not_ddp(outcome.plan) is None]
        if not outcomes:
            raise InputError(
                "--emit ddp-kwargs: none of the plans is one that stock DDP can carry out; give --policy to hear why"
            )
    outcomes.sort(key=lambda outcome: outcome.iteration_ns)
    best = outcomes[0]
    baseline = next((o for o in outcomes if o.plan.policy == BASELINE), None) or _outcome(
        policies.get(BASELINE), profile, network
    )
    if chosen is not None and baseline.plan.policy != chosen.name:
        outcomes.append(baseline)
    if emit is not None:
        click.echo(ddp_kwargs(best.plan))
    elif as_json:
        click.echo(_as_json(profile, network, outcomes, best, baseline))
    else:
        _show(profile, network, outcomes, best, baseline, chosen is not None)
    if out is not None:
        files.write(out, best.plan)
        if not as_json and emit is None:
            click.echo(f"wrote {out}")


def _knobs(texts: tuple[str, ...]) -> dict[str, Any]:
    knobs: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InputError(f"--knob: got {text!r}, expected NAME=VALUE, as in partition_bytes=4MiB")
        if name in knobs:
            raise InputError(f"--knob: got {name} twice, expected it once")
        # a float such as 0.1 is a share; everything else that policies take is a size
        knobs[name] = float(value) if re.fullmatch(r"\d*\.\d+", value) else parse_bytes(value)
    return knobs


def _outcome(policy: policies.Policy, profile: Profile, network: Network) -> Outcome:
    plan = planned_ahead(policy.plan(profile, network), profile, network)
    check_plan(plan, profile.specs)
    timeline = simulate(plan, profile, network)
    check_timeline(timeline, plan)
    return Outcome(plan, timeline.iteration_ns()[-1], timeline.hidden())


def _as_json(profile: Profile, network: Network, outcomes: list[Outcome], best: Outcome, baseline: Outcome) -> str:
    rows = [
        {
            "policy": outcome.plan.policy,
            "iteration_ns": outcome.iteration_ns,
            "ratio_to_ddp": _ratio(baseline.iteration_ns, outcome.iteration_ns),
            "ratio_to_bound": _ratio(outcome.iteration_ns, profile.compute_ns),
            "messages": len(outcome.plan.messages),
            "hidden": outcome.hidden,
            "fingerprint": outcome.plan.fingerprint,
        }
        for outcome in outcomes
    ]
    text = msgspec.json.encode(
        {
            "model": profile.model,
            "workers": network.workers,
            "bound_ns": profile.compute_ns,
            "chosen": best.plan.policy,
            "policies": rows,
        }
    )
    return msgspec.json.format(text, indent=2).decode()


def _show(
    profile: Profile, network: Network, outcomes: list[Outcome], best: Outcome, baseline: Outcome, is_given: bool
) -> None:
    table = Table(
        title=f"{profile.model}, {len(profile.tensors)} tensors, {format_bytes(profile.size_bytes)}, "
        f"on {network.workers} workers, startup {format_ns(network.startup_ns)}, {format_rate(network.bytes_per_second)}",
        title_justify="left",
    )
    table.add_column("policy", no_wrap=True)
    for heading in ("iteration", "x DDP", "x no communication", "hidden", "messages"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        cells = (
            outcome.plan.policy,
            format_ns(outcome.iteration_ns),
            _text(_ratio(baseline.iteration_ns, outcome.iteration_ns)),
            _text(_ratio(outcome.iteration_ns, profile.compute_ns)),
            f"{outcome.hidden:.0%}",
            str(len(outcome.plan.messages)),
        )
        table.add_row(*(Text(cell) for cell in cells), style="bold green" if outcome is best else None)
    console = Console()
    console.print(table)
    console.print(Text(f"bound: {format_ns(profile.compute_ns)} of computation, were communication free\n"))
    console.print(Text(_recommendation(outcomes, best, baseline, is_given)), soft_wrap=True)
    console.print(Text(best.plan.describe()), soft_wrap=True)


def _recommendation(outcomes: list[Outcome], best: Outcome, baseline: Outcome, is_given: bool) -> str:
    name = best.plan.policy
    saved = baseline.iteration_ns - best.iteration_ns
    against = (
        f"{format_ns(abs(saved))} ({_part(abs(saved), baseline.iteration_ns)}) {'less' if saved >= 0 else 'more'} than ddp"
    )
    if name == BASELINE:
        against = "which is ddp itself"
    if is_given:
        return f"{name}: {format_ns(best.iteration_ns)} an iteration, {against}"
    rival = next((outcome for outcome in outcomes if outcome is not best), None)
    text = f"recommended: {name}, {format_ns(best.iteration_ns)} an iteration, {against}"
    if rival is not None and rival.plan.policy != BASELINE:
        gap = rival.iteration_ns - best.iteration_ns
        text += f", {format_ns(gap)} ({_part(gap, rival.iteration_ns)}) less than the next, {rival.plan.policy}"
    return text


def _ratio(above: int, below: int) -> float | None:
    return above / below if below > 0 else None


def _text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def _part(part_ns: int, whole_ns: int) -> str:
    return f"{part_ns / whole_ns:.1%}" if whole_ns > 0 else "-"


def why_not_ddp(plan: Plan) -> str | None:
    """Why stock DDP cannot carry `plan` out, or None where it can.

    DDP can: whole tensors, each message a run of neighbours in readiness order, one dtype, no crossing.
    """
    if plan.crosses_barrier:
        return "it crosses the barrier, and DDP waits for all gradients before the optimizer's step"
    dtypes = sorted({spec.dtype for spec in plan.tensors})
    if len(dtypes) > 1:
        return f"it has {' and '.join(dtypes)}, and DDP fills the buckets of each dtype side by side"
    expected = 0
    for place, index in enumerate(range(len(plan.messages)) if plan.sequence is None else plan.sequence):
        message = plan.messages[index]
        for piece in message.slices:
            if piece.size_bytes != plan.tensors[piece.tensor].size_bytes:
                return f"message {index} carries a part of {plan.tensors[piece.tensor].name}, and DDP does not cut tensors"
            if piece.tensor != expected:
                return f"message {index}, number {place} to start, is not next in readiness order, and DDP keeps that order"
            expected += 1
        if message.hold_until is not None:
            return f"message {index} is held back, and DDP starts a bucket as soon as it is full"
    if any(lane.window_bytes is not None for lane in plan.lanes):
        return "it has a window, and DDP hands over each bucket as soon as it is full"
    return None


def ddp_kwargs(plan: Plan) -> str:
    """Keyword arguments that make torch's DistributedDataParallel carry `plan` out, as Python.

    A bucket closes when its size reaches its cap, so that each cap is the group's size less half of its last
    tensor: reached with that tensor, not before. Raises `InputError` saying why where DDP cannot.
    """
    reason = why_not_ddp(plan)
    if reason is not None:
        raise InputError(f"--emit ddp-kwargs: stock DDP cannot carry out this {plan.policy} plan: {reason}")
    order = range(len(plan.messages)) if plan.sequence is None else plan.sequence
    groups = [plan.messages[index] for index in order]
    caps = [(group.size_bytes - group.slices[-1].size_bytes / 2) / MIB for group in groups]
    lines = [
        f"# {plan.policy} for {plan.model}: {len(groups)} buckets, fingerprint {plan.fingerprint}",
        "# torch 2.13 or later; from the second iteration on, since DDP learns the readiness order in the first",
        f"dict(bucket_cap_mb_list={caps!r})",
    ]
    return "\n".join(lines)
