"""The progress bar of every command that simulates: on stderr, and only if that is a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress


def bar() -> Progress:
    """A bar that vanishes when it ends. Into a pipe or a log it prints nothing at all."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)
