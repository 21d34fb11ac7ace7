"""Stdout of the commands: a terminal, or a pipe, which has no width."""

from __future__ import annotations

import os

from rich.console import Console
from rich.table import Table

from gradlane.report import terminal


def console() -> Console:
    """Stdout. Into a pipe or a file lines are as long as they are, unless COLUMNS is set, and have no colours."""
    shown = Console()
    return shown if shown.is_terminal or "COLUMNS" in os.environ else Console(width=terminal.NO_LIMIT)


def print_table(table: Table) -> None:
    """Print a table on stdout, without a cut."""
    terminal.print_table(table, console())
