"""What the trials measured, and its file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from experiments.fidelity.anatomy import Anatomy
from gradlane.core.arms import BASELINE
from gradlane.core.executors import BackendName
from gradlane.report.sweep import Cell

BEST_WITHIN = 1.03
RIVALS = 3


class TrialResult(msgspec.Struct, frozen=True):
    """ratio: communication over computing, of a lone message with all bytes on an ideal link. others: the part of all
    processors' time that processes of other people took meanwhile. anatomies: by arm. finals: of a later run of the
    `finalists` alone, for longer.
    """

    model: str
    hosts: int
    ratio: float
    others: float
    cells: tuple[Cell, ...]
    anatomies: dict[str, Anatomy]
    finals: tuple[Cell, ...] = ()

    def same_as(self, model: str, hosts: int, ratio: float) -> bool:
        """Whether it is this trial, or another time of it."""
        return (self.model, self.hosts, self.ratio) == (model, hosts, ratio)

    @property
    def backends(self) -> list[BackendName]:
        return sorted({backend_of(cell) for cell in self.own})

    @property
    def own(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.arm != BASELINE]

    def loss_of_choice(self, backend: BackendName) -> float:
        """How much slower the policy is that the simulator calls best than the one that was, over a backend."""
        called, others = self._called_best(backend)
        return called.median_ns / min(cell.median_ns for cell in (called, *others)) - 1

    @property
    def finalists(self) -> list[Cell]:
        """Over each backend the policy that the simulator calls best, and the `RIVALS` fastest others."""
        chosen = []
        for backend in self.backends:
            called, others = self._called_best(backend)
            chosen += [called, *sorted(others, key=lambda cell: cell.median_ns)[:RIVALS]]
        return chosen

    def judged_loss_of_choice(self, backend: BackendName) -> float:
        """As `loss_of_choice`, by the finals: the least of many medians of a few steps is below that of any measured anew."""
        called, _ = self._called_best(backend)
        medians = {cell.arm: cell.median_ns for cell in self.finals if cell.arm != BASELINE and backend_of(cell) == backend}
        return medians[called.arm] / min(medians.values()) - 1

    def _called_best(self, backend: BackendName) -> tuple[Cell, list[Cell]]:
        """And all others."""
        cells = [cell for cell in self.own if backend_of(cell) == backend]
        called = min(cells, key=lambda cell: cell.predicted_ns)
        return called, [cell for cell in cells if cell is not called]


class Results(msgspec.Struct, frozen=True):
    """command: of the trials. finals: the command of theirs."""

    command: str
    machine: str
    trials: tuple[TrialResult, ...]
    finals: str = ""

    @property
    def backends(self) -> list[BackendName]:
        return sorted({backend for trial in self.trials for backend in trial.backends})


def backend_of(cell: Cell) -> BackendName:
    return "server" if cell.arm.endswith("@server") else "all-reduce"


def policy_of(cell: Cell) -> str:
    return cell.arm.removesuffix("@server")


def spread(errors: list[float]) -> tuple[float, float]:
    """Median and 90th percentile of the absolute errors."""
    return float(np.median(np.abs(errors))), float(np.quantile(np.abs(errors), 0.9))


def write(path: Path, results: Results) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=0))


def read(path: Path) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)
