"""Types of options that several commands have: a file to write, and the rate of a link.

The folder of a file to write is checked before the command does its work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gradlane.units import parse_rate


class _OutFile(click.Path):
    """A file to write, in a folder that exists."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        assert isinstance(path, Path)
        if not path.absolute().parent.is_dir():
            self.fail(f"got {str(path)!r}, whose folder does not exist; make it, or give another", param, ctx)
        return path


OUT_FILE = _OutFile()


def rate_or_none(text: str | None) -> int | None:
    """The value of --link: a rate in bits per second, or None if links are not to be shaped."""
    return None if text is None or text.lower() == "none" else parse_rate(text)
