"""Tables of what was measured: of the lines of a run, as text. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from bench.device.lines import Line
from gradlane.core.records.speedup import Speedup

BASELINE = "ddp"
Table = list[list[str]]  # the first row has the titles

TRAINING = ["model", "arm", "median ms", "least..most", "of DDP's time", "deferred a step", "in batches", "losses as DDP's"]
COSTS = ["ranks", "carrier", "a tensor: DDP us", "gradlane us", "a message: DDP us", "gradlane us"]
BUS = ["tensors of", "staged down GB/s", "plain", "staged up GB/s", "plain"]
PROFILES = ["model", "of", "on", "batch", "forward ms", "backward ms", "step ms", "differs by"]


def of_kind(lines: Iterable[Line], *kinds: str) -> list[Line]:
    return [line for line in lines if line["kind"] in kinds]


def training(lines: Sequence[Line]) -> Table:
    """A row for each arm that had a turn, with its time as a part of torch DDP's in the same turns."""
    rows = [TRAINING]
    turns = of_kind(lines, "turn")
    for model in dict.fromkeys(line["model"] for line in turns):
        for arm in dict.fromkeys(line["arm"] for line in turns if line["model"] == model):
            rows.append(_arm(model, arm, [line for line in lines if line.get("model") == model]))
    return rows


def _arm(model: str, arm: str, lines: Sequence[Line]) -> list[str]:
    def medians(of: str) -> dict[int, float]:
        return {line["turn"]: median(line["step_ms"]) for line in of_kind(lines, "turn") if line["arm"] == of}

    ours, theirs = medians(arm), medians(BASELINE)
    both = sorted(ours.keys() & theirs.keys())
    own = [line for line in of_kind(lines, "turn") if line["arm"] == arm]
    steps = [ms for line in own for ms in line["step_ms"]]
    losses = next((line for line in of_kind(lines, "losses") if line["arm"] == arm), None)
    ratio = ""
    if arm != BASELINE and both:
        found = Speedup.of([ours[turn] for turn in both], [theirs[turn] for turn in both])
        ratio = f"{found.ratio:.3f} ({found.low:.3f}..{found.high:.3f})"
    equal = "" if losses is None else "equal" if losses["equal"] else f"apart by {losses['most_apart']:.2g}"
    return [
        model,
        "torch DDP" if arm == BASELINE else arm,
        f"{median(steps):.0f}" if median(steps) >= 100 else f"{median(steps):.1f}",
        f"{min(steps):.0f}..{max(steps):.0f}",
        ratio,
        "" if arm == BASELINE else f"{median(line['deferred'] for line in own):.0f}",
        "" if arm == BASELINE else f"{median(line['batches'] for line in own):.0f}",
        equal if losses is None or not equal else f"{equal}, {losses['steps']} steps",
    ]


def models(lines: Sequence[Line]) -> list[str]:
    """A sentence for each network: what was trained at which batch."""
    return [
        f"{line['model']}: {line['tensors']} tensors, {line['megabytes']:.0f} MB, batch {line['batch']} a rank, {line['dtype']}"
        f"; computing alone {line['computing_ms']:.0f} ms, an all-reduce of all gradients {line['all_reduce_ms']:.0f} ms"
        for line in of_kind(lines, "model")
    ]


def searches(lines: Sequence[Line]) -> list[str]:
    """A sentence for each arm under auto: what its first steps took and came to."""
    said = []
    for line in of_kind(lines, "warm-up"):
        if line["arm"].startswith("auto"):
            end = f"{line['policy']} over {line['backend']}"
            state = f"settled on {end}" if line["settled"] else f"had not settled, and was measured with {end} in force"
            took_s = sum(line["step_ms"]) / 1e3
            said.append(f"{line['model']}: auto {state} after {len(line['step_ms'])} steps in {took_s:.1f} s, counted apart")
    return said


def costs(lines: Sequence[Line]) -> Table:
    rows = [COSTS]
    for line in of_kind(lines, "cost"):
        over = line["carrier"] if line["carrier"] == "server" else f"all-reduce, {line['group']}"
        keys = ("ddp_tensor_us", "tensor_us", "ddp_message_us", "message_us")
        rows.append([str(line["ranks"]), over, *(f"{line[key]:.1f}" for key in keys)])
    return rows


def bus(lines: Sequence[Line]) -> Table:
    keys = ("staged down", "plain down", "staged up", "plain up")
    return [BUS, *([line["tensor"], *(f"{line[key]:.1f}" for key in keys)] for line in of_kind(lines, "bus"))]


def profiles(lines: Sequence[Line]) -> Table:
    rows = [PROFILES]
    for line in of_kind(lines, "profile"):
        differs = ""
        if "ready_error" in line:
            differs = (
                f"session's forward {line['forward_error']:+.1%}, backward {line['backward_error']:+.1%}, ready "
                f"{line['ready_error']:.1%} in the median of {line['compared']}"
            )
        times = [f"{line[key]:.1f}" if key in line else "" for key in ("forward_ms", "backward_ms", "step_ms")]
        rows.append([line["model"], line["of"], line["card"], str(line["batch"]), *times, differs])
    return rows


def left_out(lines: Sequence[Line]) -> list[str]:
    """A sentence for whatever was not measured, or failed."""
    said = []
    for line in of_kind(lines, "left out", "error"):
        what = ", ".join(str(line[key]) for key in ("part", "model", "arm") if line.get(key))
        turn = f", turn {line['turn']}" if "turn" in line else ""
        reason = line["reason"] if "reason" in line else "failed: " + line["text"].strip().rpartition("\n")[2]
        said.append(f"{what}{turn}: {reason}")
    return said


def as_text(table: Table) -> str:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)


def as_markdown(table: Table) -> str:
    titles, *rows = table
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def everything(found: dict[str, Any]) -> str:
    """All tables of a run, for a terminal."""
    lines = found["lines"]
    parts = []
    for title, table in (
        ("training", training(lines)), ("cost of a tensor and a message", costs(lines)), ("bus", bus(lines)),
        ("profiles", profiles(lines)),
    ):  # fmt: skip
        if len(table) > 1:
            parts.append(f"-- {title}\n{as_text(table)}")
    notes = [*models(lines), *searches(lines)]
    out = left_out(lines)
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else []), *(["left out:\n" + "\n".join(out)] if out else [])])
