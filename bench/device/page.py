"""bench/notes/gpu.md, made of the files of `python -m tests.device` and `python -m bench.device`. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.device import summary

BEGIN, END = "<!-- by hand from here -->", "<!-- by hand to here -->"
_PLACE = "## How to read this\n\n(to be written)"
_HEAD = """\
# gradlane on GPUs

For users who train on GPUs: what was run on which card, what was not, and the results. `make test-device` and
`python -m bench.device` produce the results, and `python -m bench.device --page` makes the tables."""
_CASES = ["what", "carrier", "ranks", "passed", "failed", "not run"]


def page(tests: dict[str, Any] | None, bench: dict[str, Any] | None, before: str = "") -> str:
    """The page.

    Args:
        tests: what `python -m tests.device` wrote; None: it was not run.
        bench: what `python -m bench.device` wrote; None: it was not run.
        before: the page as it was, whose part that is written by hand is kept.
    """
    by_hand = _PLACE
    if BEGIN in before and END in before:
        by_hand = before.partition(BEGIN)[2].partition(END)[0].strip()
    parts = [_HEAD, *_tested(tests), f"{BEGIN}\n\n{by_hand}\n\n{END}", *_measured(bench)]
    return "\n\n".join(parts) + "\n"


def _where(found: dict[str, Any]) -> str:
    cards = ", ".join(found["cards"]) or "no CUDA device"
    return f"{cards}; driver {found['driver'] or 'none'}, PyTorch {found['torch']}, {found['processors']} cores"


def _tested(tests: dict[str, Any] | None) -> list[str]:
    if tests is None:
        return ["## What was run\n\n`make test-device` was not run on a machine with a GPU."]
    rows: summary.Table = [_CASES]
    keys = dict.fromkeys((row["family"], row["carrier"], row["group"], row["ranks"]) for row in tests["checks"])
    failed, not_run = [], []
    for key in keys:
        of = [row for row in tests["checks"] if (row["family"], row["carrier"], row["group"], row["ranks"]) == key]
        outcomes = [row["outcome"] for row in of]
        others = len(of) - outcomes.count("passed") - outcomes.count("failed")
        family, carrier, group, ranks = key
        counts = [str(outcomes.count("passed")), str(outcomes.count("failed")), str(others)]
        rows.append([family, carrier, f"{ranks}, {group}", *counts])
    for row in tests["checks"]:
        text = f"{row['name']} ({row['carrier']} over {row['group']}, {_ranks(row['ranks'])})"
        if row["outcome"] == "failed":
            failed.append(f"- {text}: {row['reason'].partition(chr(10))[0]}")
        elif row["outcome"] != "passed":
            not_run.append((row["reason"], row["family"] + " over " + row["group"]))
    parts = [f"## What was run\n\n`make test-device` on {_where(tests)}.{_stand_in(tests)}", summary.as_markdown(rows)]
    if failed:
        parts.append("Failed:\n\n" + "\n".join(failed))
    if not_run:
        parts.append("## What was not run\n\n" + "\n".join(_by_reason(not_run)))
    return parts


def _stand_in(tests: dict[str, Any]) -> str:
    return " The CPU stood in for a device: no GPU was used." if tests["stand_in"] else ""


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _by_reason(not_run: Sequence[tuple[str, str]]) -> list[str]:
    lines = []
    for reason in dict.fromkeys(reason for reason, _ in not_run):
        families = [family for other, family in not_run if other == reason]
        named = ", ".join(dict.fromkeys(families))
        lines.append(f"- {len(families)} checks ({named}): {reason}")
    return lines


def _measured(bench: dict[str, Any] | None) -> list[str]:
    if bench is None:
        return ["## What was measured\n\n`python -m bench.device` was not run on a machine with a GPU."]
    lines = bench["lines"]
    dry = " A dry run on the CPU: its figures say nothing of a GPU." if bench["dry"] else ""
    parts = [f"## What was measured\n\n`python -m bench.device` on {_where(bench)}.{dry}"]
    training = summary.training(lines)
    if len(training) > 1:
        text = (
            f"### Training\n\nTwo ranks on two emulated hosts at {bench['rate']}, one GPU for both unless there are more. All "
            "arms of a network train in turns in one run, from the same weights and on the same data. Read the ratio: below 1 "
            "is faster than torch DDP. Updates are deferred past `step()`, and run in so many batches."
        )
        notes = [f"- {note}" for note in (*summary.models(lines), *summary.searches(lines))]
        parts += [text, summary.as_markdown(training), "\n".join(notes)]
    for title, text, table in (
        (
            "A tensor and a message",
            "What each adds to a step on the host, beside what it adds under DDP.",
            summary.costs(lines),
        ),
        ("The bus", "Gradients to pinned memory and sums back, tensor by tensor, beside one plain copy.", summary.bus(lines)),
        (
            "Profiles",
            "What a session measures, what `gradlane convert` reads from a recording of the same step, and the zoo's times.",
            summary.profiles(lines),
        ),
    ):
        if len(table) > 1:
            parts += [f"### {title}\n\n{text}", summary.as_markdown(table)]
    out = summary.left_out(lines)
    if out:
        parts.append("### Not measured\n\n" + "\n".join(f"- {line}" for line in out))
    return parts


def write(tests: Path, bench: Path, to: Path) -> None:
    """Write the page from the two result files. Either may be missing."""
    found = [json.loads(path.read_text()) if path.exists() else None for path in (tests, bench)]
    to.write_text(page(found[0], found[1], to.read_text() if to.exists() else ""))
