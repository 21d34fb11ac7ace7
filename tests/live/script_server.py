"""Ranks of scripts, as processes that are there at once: torch was imported before they were forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).with_name("scripts")


class ScriptServer:
    """The process of `scripts/server.py`."""

    def __init__(self) -> None:
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "server.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
        )  # fmt: skip

    def ask(self, **request: Any) -> int:
        """What the process answers to `request`: a pid, or an exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()
