"""Tables on a terminal: its width is kept where it can be."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

NO_LIMIT = 10_000
"""Columns of what has no width."""


def print_table(table: Table, shown: Console) -> None:
    """Print a table, a line a row. One that is wider than the terminal has longer lines: no cell is cut."""
    for column in table.columns:
        column.no_wrap = True
    needed = shown.measure(table, options=shown.options.update(max_width=NO_LIMIT)).maximum
    width, shown.width = shown.width, max(shown.width, needed)
    shown.print(table)
    shown.width = width
