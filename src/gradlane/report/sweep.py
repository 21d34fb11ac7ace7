"""The tables of a `gradlane compare` sweep, one for each trial."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradlane.compare.arms import BASELINE
from gradlane.compare.evaluation import trial_remarks
from gradlane.compare.records import Cell, Sweep, hosts_text
from gradlane.report.table import speedup_cells
from gradlane.report.terminal import print_table
from gradlane.units import format_rate


def render_sweep(sweep: Sweep, console: Console) -> None:
    """Print a table for each trial, and the simulator's error."""
    for cells in sweep.trials:
        _render_trial(cells, sweep.model_of(cells), console)
    own = [cell for cell in sweep.cells if cell.arm != BASELINE]
    if own:
        errors = [abs(cell.error) for cell in own]
        kept = sum(_best(cells, True).median_ns <= 1.03 * _best(cells, False).median_ns for cells in sweep.trials)
        console.print(
            f"simulator: error {np.median(errors):.1%} (median), {np.quantile(errors, 0.9):.1%} (9 of 10 are below) over "
            f"{len(own)} cells, those of policies; what it calls best is within 3 % of the best measured in {kept} of "
            f"{len(sweep.trials)} trials"
        )
    console.print(Text(f"on {sweep.machine}"))


def _render_trial(cells: tuple[Cell, ...], model: str, console: Console) -> None:
    first = cells[0]
    link = (
        "links as they are" if first.link_bits_per_second is None else f"{format_rate(first.link_bits_per_second // 8)} links"
    )
    scale = f", tensors and links x {first.scale:g}" if first.scale != 1 else ""
    hosts = hosts_text(first.hosts, first.ranks_per_host)
    title = f"{model}, {hosts}, {link}{scale}; computing alone takes {first.compute_ns / 1e6:.1f} ms"
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("policy")
    for heading in ("step ms", "x DDP", "p25..p75", "simulated", "error", "bound"):
        table.add_column(heading, justify="right")
    best = max(cells, key=lambda cell: cell.speedup.ratio if cell.speedup else 1 / cell.median_ns)
    for cell in cells:
        ratio = speedup_cells(cell.speedup, cell is best, cell.beats_bound)
        row = [cell.arm, f"{cell.median_ns / 1e6:.1f}", *ratio]
        row += [f"{cell.predicted_ns / 1e6:.1f}", f"{cell.error:+.1%}", f"{cell.bound_ns / 1e6:.1f}"]
        table.add_row(*(Text(each) for each in row), style="bold green" if cell is best else None)
    console.print(Text(title, style="italic"))
    print_table(table, console)
    for line in trial_remarks(cells):
        console.print(Text(line))


def _best(cells: tuple[Cell, ...], predicted: bool) -> Cell:
    return min(
        (cell for cell in cells if cell.arm != BASELINE or len(cells) == 1),
        key=lambda cell: cell.predicted_ns if predicted else cell.median_ns,
    )
