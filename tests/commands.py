"""Commands as users give them: within this process, or in one of their own."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from gradlane.cli import main

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "train.py"


def invoke(*arguments: object, code: int = 0, columns: int | None = 200) -> str:
    """What `gradlane ARGUMENTS` prints, in this process; where it is to fail, its errors too.

    Args:
        code: the exit code that it has to end with.
        columns: of the terminal; None: it is a pipe.
    """
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], env={"COLUMNS": columns and str(columns)})
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def facts_of(path: Path) -> Any:
    """The facts of a report, as they stand in the page."""
    found = re.search(r'<script id="data" type="application/octet-stream">([^<]*)</script>', path.read_text())
    assert found is not None
    return json.loads(zlib.decompress(base64.b64decode(found[1])))["facts"]


def command_line(*arguments: object) -> list[str]:
    """The command that runs `gradlane ARGUMENTS` in a process of its own."""
    return [sys.executable, "-m", "gradlane", *map(str, arguments)]


def gradlane(*arguments: object, expect: int = 0, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """`gradlane ARGUMENTS` in a process of its own, in the repository's root.

    Args:
        expect: the exit code that it has to end with.
        timeout: seconds that it may take.
    """
    command = command_line(*arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, check=False)
    assert done.returncode == expect, f"{command}\n{done.stdout}\n{done.stderr}"
    return done
