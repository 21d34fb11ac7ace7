"""What is measured, as lines of JSON in a file: each is there as soon as it is known, whatever ends the process later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Lines:
    """Appends to a file. None for a path: keeps nothing, as on ranks but the first."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def add(self, kind: str, **values: Any) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"kind": kind, **values}) + "\n")


def read(path: Path) -> list[Line]:
    """The lines of a file; none if there is no file. One that is half written is left out."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found
