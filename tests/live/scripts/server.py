"""Runs scripts in processes forked from this one, which has imported torch already: a tenth of a second, not five.

Reads JSON lines, {"run": [script, argument...], "env": {...}, "out": path, "err": path} or {"wait": pid}, and
answers each with a number: the pid, or the exit code. A child is an interpreter like any other: it ends by itself,
with its excepthook, its atexit calls and its finalisation.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any

import gradlane.live.startup.attach  # noqa: F401


def serve() -> dict[str, Any] | None:
    """Returns in a child, with its request; and None when there are no more."""
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                return request
        print(answer, flush=True)
    return None


if __name__ == "__main__":
    request = serve()
    if request is not None:
        os.environ.update(request["env"])
        for descriptor, path in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
            opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            os.dup2(opened, descriptor)
            os.close(opened)
        sys.argv = request["run"]
        runpy.run_path(sys.argv[0], run_name="__main__")
