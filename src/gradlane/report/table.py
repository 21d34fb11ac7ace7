"""The table of `gradlane compare`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradlane.compare.arms import BASELINE
from gradlane.compare.records import Comparison
from gradlane.report.terminal import print_table
from gradlane.units import format_bytes, format_rate


def render(comparison: Comparison, console: Console) -> None:
    """Print `comparison`: DDP first, the others in their order, the best marked, the bound below."""
    link = "links as they are" if comparison.link_bits_per_second is None else f"{_bits(comparison.link_bits_per_second)} links"
    size = format_bytes(comparison.parameter_bytes)
    title = f"{comparison.model}, {size} of parameters, {comparison.hosts} hosts, {link}"
    # must fit 80 columns
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("policy")
    for heading in ("step ms", "p10", "p90", "x DDP", "hidden", "loss"):
        table.add_column(heading, justify="right")
    table.add_column("= DDP")
    noted = any(result.note for result in comparison.results)
    if noted:
        table.add_column("note")
    ratios = {result.policy: comparison.ratio(result) for result in comparison.results}
    best = max((ratio for ratio in ratios.values() if ratio is not None), default=None)
    for result in sorted(comparison.results, key=lambda result: result.policy != BASELINE):
        ratio = ratios[result.policy]
        is_best = ratio is not None and ratio == best
        cells = [
            result.policy,
            *(_ms(result.quantile_ns(part)) for part in (0.5, 0.1, 0.9)),
            "-" if ratio is None else f"{ratio:.2f}{' *' if is_best else ''}",
            "-" if result.hidden is None else f"{result.hidden:.0%}",
            "-" if result.final_loss is None else f"{result.final_loss:.4f}",
            {True: "yes", False: "no", None: "-"}[result.equal_to_ddp],
            *([result.note] if noted else []),
        ]
        # as Text, so that rich does not interpret a file's contents as markup
        table.add_row(*(Text(cell) for cell in cells), style="bold green" if is_best else None)
    console.print(Text(title, style="italic"))
    print_table(table, console)
    console.print(_below(comparison))


def _below(comparison: Comparison) -> Text:
    bound = "unknown" if comparison.bound is None else f"{comparison.bound:.2f} x DDP"
    text = f"bound: {bound}, {comparison.bound_text}" if comparison.bound_text else f"bound: {bound}"
    key = "* best ratio to torch DDP, above 1 is faster; = DDP: parameters and buffers at the end equal DDP's bit for bit"
    return Text(f"{text}\non {comparison.machine}\n{key}")


def _ms(time_ns: float | None) -> str:
    return "-" if time_ns is None else f"{time_ns / 1e6:.1f}" if time_ns >= 1e7 else f"{time_ns / 1e6:.2f}"


def _bits(bits_per_second: int) -> str:
    return format_rate(bits_per_second // 8) if bits_per_second >= 8 else f"{bits_per_second} bit/s"
