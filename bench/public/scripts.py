"""The table of public scripts (`scripts.yaml`), read and checked."""

from __future__ import annotations

from pathlib import Path

import msgspec

_Change = tuple[str, str]


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One public script.

    Attributes:
        name: in the table.
        folder: a folder of a checkout. A copy of it is where the script is started.
        start: the file, from there, and its arguments.
        data: the function of `data.py` that makes its data.
        changes: pattern and replacement, of any file of the copy, beside those of the device.
    """

    name: str
    folder: str
    start: str
    data: str = "nothing"
    changes: tuple[_Change, ...] = ()


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All scripts, and `device`: the changes of each of them."""

    device: tuple[_Change, ...]
    scripts: tuple[Script, ...]


def table() -> Table:
    return msgspec.yaml.decode(Path(__file__).with_name("scripts.yaml").read_bytes(), type=Table)
