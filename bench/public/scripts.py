"""The table of public scripts (`scripts.yaml`), read and checked."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

_Change = tuple[str, str]


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One public script.

    Attributes:
        name: in the table.
        folder: a folder of a checkout. A copy of it is where the script is started.
        start: the file, from there, and its arguments; see `started`.
        data: the function of `data.py` that makes its data.
        changes: pattern and replacement, of any file of the copy.
        cpu: further ones on the CPU, beside those of all scripts.
    """

    name: str
    folder: str
    start: str
    data: str = "nothing"
    changes: tuple[_Change, ...] = ()
    cpu: tuple[_Change, ...] = ()

    def started(self, device: str) -> list[str]:
        """The file and its arguments where ranks train on `device`, "cpu" or "cuda"."""
        flags = {"cpu": "--cpu", "use_cpu": "--use_cpu"} if device == "cpu" else {"cpu": "", "use_cpu": ""}
        return shlex.split(self.start.format(device=device, group="gloo" if device == "cpu" else "nccl", **flags))


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All scripts, and the changes of each of them on the CPU."""

    cpu: tuple[_Change, ...]
    scripts: tuple[Script, ...]

    def changes(self, script: Script, device: str) -> tuple[_Change, ...]:
        """All that change where ranks train on `device`."""
        return script.changes if device != "cpu" else (*self.cpu, *script.cpu, *script.changes)


def table() -> Table:
    return msgspec.yaml.decode(Path(__file__).with_name("scripts.yaml").read_bytes(), type=Table)
