"""What the trials measured, and its file."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
import numpy as np

from experiments.fidelity.anatomy import Anatomy
from gradlane.core.arms import BASELINE
from gradlane.report.sweep import Cell

BEST_WITHIN = 1.03


class TrialResult(msgspec.Struct, frozen=True):
    """ratio: communication over computing, of a lone message with all bytes on an ideal link. others: the part of all
    processors' time that processes of other people took meanwhile. anatomies: by arm.
    """

    model: str
    hosts: int
    ratio: float
    others: float
    cells: tuple[Cell, ...]
    anatomies: dict[str, Anatomy]

    @property
    def own(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.arm != BASELINE]

    def loss_of_choice(self, backend: str) -> float:
        """How much slower the policy is that the simulator calls best than the one that was, over a backend."""
        cells = [cell for cell in self.own if backend_of(cell) == backend]
        chosen = min(cells, key=lambda cell: cell.predicted_ns)
        return chosen.median_ns / min(cell.median_ns for cell in cells) - 1

    def checked_loss_of_choice(self, backend: str) -> float:
        """The same where one half of each arm's steps says which was best and the other how long both took; the mean of both
        ways. The least of many medians of a few steps is below that of any of them measured anew.
        """
        cells = [cell for cell in self.own if backend_of(cell) == backend]
        chosen = min(cells, key=lambda cell: cell.predicted_ns)
        losses = []
        for judge in (0, 1):
            best = min(cells, key=lambda cell: _half_ns(cell, 1 - judge))
            losses.append(_half_ns(chosen, judge) / _half_ns(best, judge) - 1)
        return statistics.mean(losses)


class Results(msgspec.Struct, frozen=True):
    command: str
    machine: str
    trials: tuple[TrialResult, ...]

    @property
    def backends(self) -> list[str]:
        return sorted({backend_of(cell) for trial in self.trials for cell in trial.own})


def backend_of(cell: Cell) -> str:
    return "server" if cell.arm.endswith("@server") else "all-reduce"


def policy_of(cell: Cell) -> str:
    return cell.arm.removesuffix("@server")


def _half_ns(cell: Cell, half: int) -> float:
    middle = len(cell.step_ns) // 2
    return statistics.median(cell.step_ns[middle:] if half else cell.step_ns[:middle])


def spread(errors: list[float]) -> tuple[float, float]:
    """Median and 90th percentile of the absolute errors."""
    return float(np.median(np.abs(errors))), float(np.quantile(np.abs(errors), 0.9))


def write(path: Path, results: Results) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=0))


def read(path: Path) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)
