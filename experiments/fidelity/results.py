"""What the trials measured, and its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from experiments.fidelity.anatomy import Anatomy
from gradlane.compare.arms import BASELINE
from gradlane.compare.records import Cell
from gradlane.core.backends import BackendName

BEST_WITHIN = 1.03
RIVALS = 3


class TrialResult(msgspec.Struct, frozen=True):
    """hosts, ranks_per_host: of the lab. ratio: communication over computing, of a lone message with all bytes on an ideal
    link. others: the part of all processors' time that processes of other people took meanwhile. anatomies: by arm. finals:
    of a later run of the `finalists` alone, for longer.
    """

    model: str
    hosts: int
    ratio: float
    others: float
    cells: tuple[Cell, ...]
    anatomies: dict[str, Anatomy]
    finals: tuple[Cell, ...] = ()
    ranks_per_host: int = 1

    def same_as(self, model: str, hosts: int, ratio: float, ranks_per_host: int = 1) -> bool:
        """Whether it is this trial, or another time of it."""
        return (self.model, self.hosts, self.ratio, self.ranks_per_host) == (model, hosts, ratio, ranks_per_host)

    def beside(self, other: TrialResult) -> TrialResult:
        """This one, with the arms that another result of the trial has and this one has not, and the finals of backends
        that this one has not.
        """
        mine = {cell.arm for cell in self.cells}
        return msgspec.structs.replace(
            self,
            others=max(self.others, other.others),
            cells=(*(cell for cell in other.cells if cell.arm not in mine), *self.cells),
            anatomies={**other.anatomies, **self.anatomies},
            finals=(*(cell for cell in other.finals if backend_of(cell) not in self.backends), *self.finals),
        )

    @property
    def backends(self) -> list[BackendName]:
        return sorted({backend_of(cell) for cell in self.own})

    @property
    def judged(self) -> list[BackendName]:
        """Backends that the finals are of."""
        return sorted({backend_of(cell) for cell in self.finals if cell.arm != BASELINE})

    @property
    def own(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.arm != BASELINE]

    def loss_of_choice(self, backend: BackendName) -> float:
        """How much slower the policy is that the simulator calls best than the one that was, over a backend."""
        return self._loss_of_choice(backend, self.cells)

    def judged_loss_of_choice(self, backend: BackendName) -> float:
        """As `loss_of_choice`, by the finals: the least of many medians of a few steps is below that of any measured anew.

        backend: one of `judged`.
        """
        return self._loss_of_choice(backend, self.finals)

    @property
    def finalists(self) -> list[Cell]:
        """Over each backend the policy that the simulator calls best, and the `RIVALS` fastest others."""
        chosen = []
        for backend in self.backends:
            called = self._called_best(backend)
            others = [cell for cell in _over(backend, self.cells) if cell is not called]
            chosen += [called, *sorted(others, key=lambda cell: cell.median_ns)[:RIVALS]]
        return chosen

    def _called_best(self, backend: BackendName) -> Cell:
        return min(_over(backend, self.cells), key=lambda cell: cell.predicted_ns)

    def _loss_of_choice(self, backend: BackendName, cells: Sequence[Cell]) -> float:
        """By the times of `cells`."""
        medians = {cell.arm: cell.median_ns for cell in _over(backend, cells)}
        return medians[self._called_best(backend).arm] / min(medians.values()) - 1


class Results(msgspec.Struct, frozen=True):
    """command: of the trials. finals: the command of theirs."""

    command: str
    machine: str
    trials: tuple[TrialResult, ...]
    finals: str = ""

    @property
    def backends(self) -> list[BackendName]:
        return sorted({backend for trial in self.trials for backend in trial.backends})


def _over(backend: BackendName, cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.arm != BASELINE and backend_of(cell) == backend]


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
