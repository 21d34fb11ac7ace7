"""From the times that were measured to speedups, the bound, and what to say of both."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gradlane.compare.arms import ALONE, BASELINE
from gradlane.compare.records import Cell, Comparison, Result
from gradlane.core.records.search_log import AUTO
from gradlane.core.records.speedup import Speedup, disturbed, turn_times
from gradlane.units import format_bytes

_APART = 1.02  # a ratio of medians this far outside the turns' ratios is worth a line


def evaluate(
    outcome: Mapping[str, Any],
    *,
    command: str,
    machine: str,
    hosts: int,
    link_bits_per_second: int | None,
    ranks_per_host: int = 1,
) -> Comparison:
    """Compare all arms of a run with torch DDP, each turn with DDP's of the same round.

    In each turn no schedule can make a step shorter than the longer of computing alone and one
    all-reduce of all gradients, both measured in that turn. The bound is DDP's speedup over that,
    so that a disturbed turn of DDP raises the bound as much as it raises the ratios.

    Args:
        outcome: what rank 0 left, as `worker.Outcome` in JSON.
        command, machine, hosts, link_bits_per_second, ranks_per_host: as in `Comparison`.
    """
    arms = outcome["arms"]
    turns = {name: turn_times(arm["step_ns"], outcome["turns"]) for name, arm in arms.items()}
    computing, summing = turns[ALONE], turn_times(outcome["all_reduce_ns"], outcome["turns"])
    bound = Speedup.of(turns[BASELINE], [max(pair) for pair in zip(computing, summing, strict=True)])
    results = []
    for name, arm in arms.items():
        if name == ALONE:
            continue  # it is no policy, and only the bound uses it
        speedup = Speedup.of(turns[BASELINE], turns[name])
        parts = [1 - (own - alone) / wire for own, alone, wire in zip(turns[name], computing, summing, strict=True)]
        hidden = statistics.median(parts)
        results.append(
            Result(
                policy=name,
                step_ns=tuple(arm["step_ns"]),
                speedup=speedup,
                beats_bound=speedup.ratio > bound.ratio,
                hidden=min(1.0, hidden) if hidden >= 0 else None,
                loss=arm["loss"],
                # beyond two ranks a sum's last bits depend on how it is cut, which differs between
                # two runs of DDP too
                equal_to_ddp=arm["equal_to_ddp"] if hosts * ranks_per_host == 2 else arm["equal_to_ddp"] or None,
                note="default" if name.partition("@")[0] == AUTO else "",
                card_bytes=arm.get("card_bytes"),
            )
        )
    reasons = [
        _why_above(result, bound, turns[result.policy], computing, summing)
        for result in results
        if result.beats_bound and result.speedup is not None
    ]
    return Comparison(
        command=command,
        machine=machine,
        hosts=hosts,
        link_bits_per_second=link_bits_per_second,
        model=outcome["model"],
        parameter_bytes=outcome["parameter_bytes"],
        turns=outcome["turns"],
        bound=bound,
        bound_text=(
            f"a step takes at least the longer of computing ({statistics.median(computing) / 1e6:.0f} ms alone) and "
            f"communicating ({statistics.median(summing) / 1e6:.0f} ms as one all-reduce), by turns; "
            "hidden: the part of the latter that does not lengthen the step, - where a step takes longer than both together"
        ),
        results=tuple(results),
        remarks=(
            *reasons,
            *_baseline_remarks(turns[BASELINE], results),
            *_card_remarks(results, hosts, outcome["parameter_bytes"]),
        ),
        ranks_per_host=ranks_per_host,
        loss_step=outcome["loss_step"],
    )


class Answer(NamedTuple):
    """The result of a comparison.

    Attributes:
        arm: that it is about, the one to use; None if nothing was measured beside torch DDP.
        number: how many times as fast it is, for people.
        sentence: for people.
    """

    arm: str | None
    number: str
    sentence: str


def answer(speedups: Mapping[str, Speedup | None], bound: float | None) -> Answer:
    """The result: of `auto` if it took part, else of the fastest arm.

    Args:
        speedups: over torch DDP, by arm; None for an arm without one.
        bound: the speedup that no schedule can exceed; None if it is not known.
    """
    own = {name: speedup for name, speedup in speedups.items() if speedup is not None and name != BASELINE}
    if not own:
        return Answer(None, "-", "No policy was measured beside torch DDP.")
    best = max(own, key=lambda name: own[name].ratio)
    told = next((name for name in own if name.partition("@")[0] == AUTO), best)
    of = own[told]
    said = f"With {told}, training is {of.ratio:.2f} times as fast as under torch DDP ({of.low:.2f} to {of.high:.2f})"
    if best != told:
        said += f"; with {best}, {own[best].ratio:.2f} times"
    if bound is not None:
        said += f"; no schedule can exceed {bound:.2f} times here"
    return Answer(told, f"{of.ratio:.2f}x", f"{said}.")


def trial_remarks(cells: Sequence[Cell]) -> list[str]:
    """What to know before relying on the ratios of one trial; a line each."""
    lines = []
    for cell in cells:
        if cell.beats_bound:
            shorter = sum(turn < cell.bound_ns for turn in turn_times(cell.step_ns, cell.turns))
            lines.append(
                f"! {cell.arm} is {1 - cell.median_ns / cell.bound_ns:.1%} below the bound, in {shorter} of {cell.turns} "
                "turns: the bound is simulated from computing alone and the network as the run measured them, "
                "and one was too slow"
            )
    baseline = next((cell for cell in cells if cell.arm == BASELINE), None)
    if baseline is not None:
        lines += _baseline_remarks(turn_times(baseline.step_ns, baseline.turns), cells)
    return lines + _card_remarks(cells, cells[0].hosts, cells[0].gradient_bytes)


def _why_above(
    result: Result, bound: Speedup, own: Sequence[float], computing: Sequence[float], summing: Sequence[float]
) -> str:
    assert result.speedup is not None
    if result.speedup.low <= bound.high:
        return f"! {result.policy} is above the bound by less than turns differ: {result.speedup.spread}, bound {bound.spread}"
    # a median ratio above the bound's has a turn of its own that was shorter than its turn's bound
    faster = {
        "computing alone: computing times differed": _shorter(own, computing),
        "one all-reduce of all gradients: the network's rate differed": _shorter(own, summing),
    }
    what = max(faster, key=faster.__getitem__)
    return f"! {result.policy} is above the bound: in {faster[what]} of {len(own)} turns its steps were shorter than {what}"


def _shorter(own: Sequence[float], others: Sequence[float]) -> int:
    return sum(mine < theirs for mine, theirs in zip(own, others, strict=True))


def _baseline_remarks(turns_ns: Sequence[float], arms: Sequence[Result | Cell]) -> list[str]:
    """One line if torch DDP's turns differ, or if medians give other ratios than the turns do."""
    said = disturbed(turns_ns)
    if said is None:
        baseline_ns = statistics.median(turns_ns)
        apart = [_name(arm) for arm in arms if _name(arm) != BASELINE and _apart(baseline_ns, arm)]
        if not apart:
            return []
        said = f"disturbed in some turns, or {', '.join(apart)}: medians have another ratio than turns"
    return [f"{BASELINE} was {said}; x DDP is of steps in the same turns, rely on it and not on ratios of step ms"]


def _card_remarks(arms: Sequence[Result | Cell], hosts: int, gradient_bytes: int) -> list[str]:
    """One line: what a host sent in a step, beside what an all-reduce among hosts needs.

    Each of H hosts has to send 2 (H - 1) / H of the gradients' bytes. It sends the other hosts the parts that they sum, and
    then to each of them the part that it has summed.
    """
    counted = [arm for arm in arms if arm.card_bytes is not None]
    if not counted or not gradient_bytes or hosts < 2:
        return []
    least = 2 * (hosts - 1) * gradient_bytes / hosts
    sent = ", ".join(f"{_name(arm)} {(arm.card_bytes or 0) / least:.2f}" for arm in counted)
    return [
        f"sent by rank 0's host in a step, in units of the {format_bytes(round(least))} that an all-reduce among {hosts} hosts "
        f"needs (2 (H - 1) / H of the gradients; headers counted): {sent}"
    ]


def _apart(baseline_ns: float, arm: Result | Cell) -> bool:
    if arm.speedup is None or arm.median_ns is None:
        return False
    of_medians = baseline_ns / arm.median_ns
    return not arm.speedup.low / _APART <= of_medians <= arm.speedup.high * _APART


def _name(arm: Result | Cell) -> str:
    return arm.policy if isinstance(arm, Result) else arm.arm
