"""Simulates all policies (`planning.ranking`) in a process of its own while this one trains."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time

import msgspec

from gradlane.lifetime import starter
from gradlane.planning.ranking import Answer, Question

_NICE = 10  # at 19, the lowest priority, the process would not get to start on a busy machine
_LATE_S = 15.0  # on top of the question's budget, for starting the interpreter


class RankingProcess:
    """One simulation, started by the constructor. It runs at a low priority, so that training comes
    first.

    Args:
        question: what to rank; its `budget_ns` limits the simulating.
    """

    def __init__(self, question: Question) -> None:
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115  # open for as long as this object
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = time.monotonic() + question.budget_ns / 1e9 + _LATE_S
        with contextlib.suppress(OSError), starter(), tempfile.TemporaryFile() as asked:
            asked.write(msgspec.json.encode(question))
            asked.seek(0)
            command = [sys.executable, "-m", "gradlane.planning.ranking"]
            self._process = subprocess.Popen(command, stdin=asked, stdout=self._answer, stderr=subprocess.DEVNULL)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICE)

    def answer(self) -> Answer | None:
        """The ranking, without waiting.

        Returns:
            None while the process runs. An empty answer if it failed or ran 15 s over its budget.
        """
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
        """End the process if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
