"""Printing on stdout: a terminal's width is kept where it can be, and a pipe has none."""

from __future__ import annotations

import os

from rich.console import Console
from rich.table import Table

_NO_LIMIT = 10_000  # columns


def console() -> Console:
    """Stdout. Into a pipe or a file lines are as long as they are, unless COLUMNS is set, and have no colours."""
    shown = Console()
    return shown if shown.is_terminal or "COLUMNS" in os.environ else Console(width=_NO_LIMIT)


def print_table(table: Table, shown: Console | None = None) -> None:
    """Print a table, a line a row. One that is wider than the terminal has longer lines: no cell is cut.

    Args:
        table: what to print.
        shown: where; None: stdout.
    """
    shown = shown or console()
    for column in table.columns:
        column.no_wrap = True
    needed = shown.measure(table, options=shown.options.update(max_width=_NO_LIMIT)).maximum
    width, shown.width = shown.width, max(shown.width, needed)
    shown.print(table)
    shown.width = width
