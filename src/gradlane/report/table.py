"""The table of `gradlane compare`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradlane.compare.arms import BASELINE
from gradlane.compare.evaluation import answer
from gradlane.compare.records import Comparison, hosts_text
from gradlane.core.records.speedup import Speedup
from gradlane.report.terminal import print_table
from gradlane.units import format_bytes, format_rate


def render(comparison: Comparison, console: Console) -> None:
    """Print `comparison`: DDP first, the others in their order, the bound below.

    The fastest is marked; the row that the sentence above the table is about is bold.
    """
    link = "links as they are" if comparison.link_bits_per_second is None else f"{_bits(comparison.link_bits_per_second)} links"
    size = format_bytes(comparison.parameter_bytes)
    hosts = hosts_text(comparison.hosts, comparison.ranks_per_host)
    title = f"{comparison.model}, {size} of parameters, {hosts}, {link}"
    # must fit 80 columns
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("policy")
    for heading in ("step ms", "x DDP", "p25..p75", "hidden", "loss"):
        table.add_column(heading, justify="right")
    table.add_column("= DDP")
    noted = any(result.note for result in comparison.results)
    if noted:
        table.add_column("note")
    best = max((result.speedup.ratio for result in comparison.results if result.speedup is not None), default=None)
    bound = None if comparison.bound is None else comparison.bound.ratio
    found = answer({result.policy: result.speedup for result in comparison.results}, bound)
    for result in sorted(comparison.results, key=lambda result: result.policy != BASELINE):
        is_best = result.speedup is not None and result.speedup.ratio == best
        cells = [
            result.policy,
            _ms(result.median_ns),
            *speedup_cells(result.speedup, is_best, result.beats_bound),
            "-" if result.hidden is None else f"{result.hidden:.0%}",
            "-" if result.loss is None else f"{result.loss:.4f}",
            {True: "yes", False: "no", None: "-"}[result.equal_to_ddp],
            *([result.note] if noted else []),
        ]
        # as Text, so that rich does not interpret a file's contents as markup
        table.add_row(*(Text(cell) for cell in cells), style="bold green" if result.policy == found.arm else None)
    console.print(Text(found.sentence, style="bold"))
    console.print(Text(title, style="italic"))
    print_table(table, console)
    console.print(_below(comparison))


def speedup_cells(speedup: Speedup | None, is_best: bool, beats_bound: bool) -> tuple[str, str]:
    """The cells "x DDP", with its marks, and "p25..p75"."""
    if speedup is None:
        return "-", "-"
    marks = ("!" if beats_bound else "") + ("*" if is_best else "")
    return f"{speedup.ratio:.2f}" + (f" {marks}" if marks else ""), speedup.spread


def _below(comparison: Comparison) -> Text:
    bound = "bound: unknown"
    if comparison.bound is not None:
        bound = f"bound: {comparison.bound.ratio:.2f} x DDP ({comparison.bound.spread})"
    if comparison.bound_text:
        bound += f", {comparison.bound_text}"
    key = (
        f"x DDP: torch DDP's step over this one's, the median of {comparison.turns} turns; * the best; "
        "= DDP: parameters and buffers at the end equal DDP's bit for bit"
        + ("" if comparison.loss_step is None else f"; loss: after {comparison.loss_step} steps of each")
    )
    return Text("\n".join((bound, *comparison.remarks, f"on {comparison.machine}", key)))


def _ms(time_ns: float | None) -> str:
    return "-" if time_ns is None else f"{time_ns / 1e6:.1f}" if time_ns >= 1e7 else f"{time_ns / 1e6:.2f}"


def _bits(bits_per_second: int) -> str:
    return format_rate(bits_per_second // 8) if bits_per_second >= 8 else f"{bits_per_second} bit/s"
