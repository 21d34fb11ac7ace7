"""Wrong command lines with what gradlane says to each: `golden/wrong_inputs.txt`.

A line that begins with "$ " is a command, and the next one is its error; "..." at an end stands for the rest of it. The
commands run in a folder of `make_folder`.
"""

from __future__ import annotations

import gzip
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from click.testing import CliRunner
from msgspec import structs

from gradlane.cli import main
from gradlane.core import files
from gradlane.core.plan import Ownership, Plan
from gradlane.core.profile import Profile
from tests.commands import ROOT

GOLDEN = ROOT / "tests" / "golden"
FILE = GOLDEN / "wrong_inputs.txt"
_BEFORE = "$ gradlane "


def rows() -> Iterator[tuple[str, str]]:
    """Each command, without `gradlane`, and its error."""
    for row in FILE.read_text().split("\n\n"):
        command, said = row.strip().split("\n")
        yield command.removeprefix(_BEFORE), said


def make_folder(folder: Path) -> None:
    """Make the files that the commands name, but for those that are not to be there."""
    for name in ("profile.json", "network.json", "plan.json"):
        shutil.copy(GOLDEN / name, folder)
    profile = files.read(GOLDEN / "profile.json", Profile)
    files.write(folder / "zero.json", profile.stretched(0))
    plan = files.read(GOLDEN / "plan.json", Plan)
    files.write(folder / "twice.json", structs.replace(plan, messages=(*plan.messages, plan.messages[-1]), sequence=None))
    files.write(folder / "owned.json", structs.replace(plan, owners=Ownership((0, 9)), sequence=None))
    (folder / "folder").mkdir()
    (folder / "wrong.json").write_text("{}")
    for name in ("empty.json", "train.py"):
        (folder / name).touch()
    (folder / "lab.yaml").write_text("hosts: many\n")
    (folder / "lab.json").write_text('{"hosts": 2}')
    (folder / "trace.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))


def check(command: str, said: str) -> None:
    """Run the command, which has to end with exit code 2 and this line alone."""
    result = CliRunner().invoke(main, shlex.split(command))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    expected = f"gradlane: {said.removesuffix('...')}"
    assert result.stderr.startswith(expected) if said.endswith("...") else result.stderr == f"{expected}\n"
    assert result.stderr.count("\n") == 1
