"""Console: where the lines go that gradlane says to whoever runs a script.

They are records of the logger `gradlane`. The script's logging may send those to a file, or print them in a format of its
own that hides them among its lines. So warnings are printed on stderr as they are, as `warnings` does. A script that
wants them elsewhere gives that logger a handler.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

ONCE = {"once": True}
"""`extra` of a record that a process prints once, however many sessions say it."""


class _Console(logging.Handler):
    """Prints warnings on stderr, above a progress bar of tqdm; records below that level go the way of the script's logging."""

    def __init__(self) -> None:
        super().__init__()
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:
            root = logging.getLogger()
            if record.levelno >= root.level:
                root.handle(record)
            return
        text = record.getMessage()
        if getattr(record, "once", False):
            if text in self._printed:
                return
            self._printed.add(text)
        try:
            _print(text)
        except Exception:
            self.handleError(record)


def _print(text: str) -> None:
    # a bar that is under way has left the cursor at its end; only tqdm itself knows which bars there are
    bars: Any = sys.modules.get("tqdm")
    if hasattr(bars, "tqdm"):
        bars.tqdm.write(text, file=sys.stderr)
    else:
        print(text, file=sys.stderr, flush=True)


def use_console() -> None:
    """Print gradlane's warnings on stderr from now on, unless the script has given the logger `gradlane` a handler."""
    logger = logging.getLogger("gradlane")
    if not logger.handlers and logger.propagate:
        logger.addHandler(_Console())
        logger.propagate = False
