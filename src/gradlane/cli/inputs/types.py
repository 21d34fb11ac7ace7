"""Types of options that several commands have: a file to write, whose folder is checked before the
work; the rate of a link.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gradlane.units import parse_rate


class _OutFile(click.Path):
    """A file in a folder that exists."""

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
    """The option --link: a rate in bits per second, None for links as they are."""
    return None if text is None or text.lower() == "none" else parse_rate(text)
