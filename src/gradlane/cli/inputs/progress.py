"""The progress bar of every command that simulates: on stderr, and only where somebody looks at it."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress


def bar() -> Progress:
    """A bar that leaves nothing behind: in a pipe or a log not even the empty line that rich would."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)
