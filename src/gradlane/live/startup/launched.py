"""What this process knows of its launcher: the options it gave, and whether a model was attached that they concern."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from gradlane.core.launch_options import LaunchOptions

_launched: LaunchOptions | None = None
_attached = False
_attaches: list[Callable[[], None]] = []


def launched() -> LaunchOptions:
    """The options of the launcher of this process, or of its environment; empty if there are none.

    Raises:
        InputError: the environment variable has a wrong value.
    """
    return LaunchOptions.from_environment(os.environ) if _launched is None else _launched


def listen_to_attach(listener: Callable[[], None]) -> None:
    """Have `listener` called where this process begins to attach a model, in the thread that does."""
    _attaches.append(listener)


def begin_attach() -> None:
    """This process is about to attach a model."""
    for listener in _attaches:
        listener()


def note_attached() -> None:
    """This process has attached a model, so that the launcher's options have an effect."""
    global _attached
    _attached = True
    folder = launched().attached
    if folder is not None:
        with contextlib.suppress(OSError):  # what is said at the end is worth no failure
            Path(folder, str(os.getpid())).touch()


def has_attached() -> bool:
    """Whether this process has attached a model."""
    return _attached


def set_launched(options: LaunchOptions) -> None:
    """Make every later `attach` in this process obey `options`."""
    global _launched
    _launched = options
