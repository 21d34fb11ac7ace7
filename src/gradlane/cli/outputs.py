"""Files that commands write: where they would go is checked before the work, not after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


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
