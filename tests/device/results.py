"""The outcome of each check, as a file and as a table."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.device.machine import Machine

OUTCOMES = ("passed", "failed", "skipped", "left out")


@dataclass(frozen=True)
class Row:
    """One check. outcome: one of `OUTCOMES`; "left out" where time was up. reason: "" or a remark where it passed."""

    family: str
    name: str
    carrier: str
    group: str
    ranks: int
    outcome: str
    seconds: float
    reason: str = ""


class Results:
    """Rows of a run. Each row is in the file as soon as it is known. Any thread may add one.

    Args:
        path: the file; its folder is made.
        stand_in: the CPU was taken for a device.
    """

    def __init__(self, path: Path, machine: Machine, stand_in: bool) -> None:
        self._path, self._head = path, {**asdict(machine), "stand_in": stand_in}
        self.rows: list[Row] = []
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.save()

    def add(self, row: Row) -> None:
        with self._lock:
            self.rows.append(row)
            print(line(row), flush=True)
            self.save()

    def save(self) -> None:
        text = json.dumps({**self._head, "checks": [asdict(row) for row in self.rows]}, indent=1)
        new = self._path.with_suffix(".new")
        new.write_text(text + "\n")
        os.replace(new, self._path)

    @property
    def all_is_well(self) -> bool:
        return not any(row.outcome in ("failed", "left out") for row in self.rows)


def line(row: Row) -> str:
    where = f"{row.carrier} over {row.group} x {row.ranks}"
    reason = row.reason.partition("\n")[0][:150]
    return f"{row.outcome:>8} {row.seconds:6.1f} s  {row.family:<16} {row.name:<44} {where:<24} {reason}".rstrip()


def table(rows: Sequence[Row]) -> str:
    """How many checks of each family ended how, and every failure in full."""
    lines = [f"{'family':<18}" + "".join(f"{outcome:>10}" for outcome in OUTCOMES)]
    for family in dict.fromkeys(row.family for row in rows):
        counts = [sum(row.family == family and row.outcome == outcome for row in rows) for outcome in OUTCOMES]
        lines.append(f"{family:<18}" + "".join(f"{count:>10}" for count in counts))
    lines.append(f"{'all':<18}" + "".join(f"{sum(row.outcome == outcome for row in rows):>10}" for outcome in OUTCOMES))
    for row in rows:
        if row.outcome == "failed":
            lines.append(f"\n{row.family}, {row.name}, {row.carrier} over {row.group} x {row.ranks}:\n{row.reason}")
    for reason in dict.fromkeys(row.reason for row in rows if row.outcome in ("skipped", "left out")):
        count = sum(row.reason == reason and row.outcome in ("skipped", "left out") for row in rows)
        lines.append(f"\n{count} not run: {reason}")
    return "\n".join(lines)
