"""What the launcher and the lab's init tell each other, once each way."""

from __future__ import annotations

import msgspec

from gradlane.lab.spec import LabSpec

TIMED_OUT = 124  # as timeout(1) has it
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class RunOutcome(msgspec.Struct, frozen=True):
    """How a run in a lab ended.

    `exit_code` is that of the first rank or server that failed (128 + signal where a signal ended it), 124 when the time
    was up, 130 when the user interrupted, else 0. `exit_codes` are those of each rank, counted the same way, job after
    job; `first_failed_rank` is a place among them, None also where it was a server that failed.
    """

    exit_code: int = 0
    exit_codes: tuple[int, ...] = ()
    first_failed_rank: int | None = None
    congestion_control: str = ""
    setup_seconds: float = 0.0
    seconds: float = 0.0


class Job(msgspec.Struct, frozen=True):
    """What the launcher tells the lab's init, beside the command and the environment."""

    spec: LabSpec
    launcher_pid: int
    lifeline_fd: int
    report_fd: int
    grace_seconds: float
    timeout_seconds: float | None
    announce: bool
    samples: str | None = None


class Report(msgspec.Struct, frozen=True):
    """What the lab's init tells the launcher: how the run ended, or why there was none."""

    outcome: RunOutcome | None = None
    refused: str | None = None
    unusable: str | None = None
