"""Thinking: the simulator's answer, from a process of its own, while this one trains."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time

import msgspec

from gradlane.planning.ranking import Answer, Question

_NICE = 10  # at the lowest, 19, a busy machine would not let it begin
_LATE_S = 15.0  # beyond the time that was granted: the interpreter has to start first


class RankingProcess:
    """Begun when made. Runs at a low priority, so that ranks beside it come first."""

    def __init__(self, question: Question) -> None:
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115  # it lives as long as this
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = time.monotonic() + question.budget_ns / 1e9 + _LATE_S
        with contextlib.suppress(OSError), tempfile.TemporaryFile() as asked:
            asked.write(msgspec.json.encode(question))
            asked.seek(0)
            command = [sys.executable, "-m", "gradlane.planning.ranking"]
            self._process = subprocess.Popen(command, stdin=asked, stdout=self._answer, stderr=subprocess.DEVNULL)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICE)

    def answer(self) -> Answer | None:
        """What was found; None for as long as it thinks; an empty answer where it could not."""
        if self._process is not None:
            if self._process.poll() is None:
                if time.monotonic() < self._deadline:
                    return None
                self.close()
            elif self._process.returncode == 0:
                self._answer.seek(0)
                return msgspec.json.decode(self._answer.read(), type=Answer)
        return Answer((), ())

    def close(self) -> None:
        """End it, where it has not ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
