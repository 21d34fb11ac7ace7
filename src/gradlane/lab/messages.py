"""Messages between the launcher and the lab's init, one each way."""

from __future__ import annotations

import msgspec

from gradlane.lab.spec import LabSpec

TIMED_OUT = 124  # as timeout(1)
INTERRUPTED = 130  # 128 + SIGINT, as shells


class RunOutcome(msgspec.Struct, frozen=True):
    """How a run in a lab ended.

    Attributes:
        exit_code: that of the first rank or server that failed (128 + signal if a signal ended it), 124 after a timeout, else
            0. A signal that `gradlane.lifetime` handles gives 128 + signal, so Ctrl-C 130.
        exit_codes: of each rank, job after job, counted the same way.
        first_failed_rank: index into `exit_codes`; None if no rank failed, or a server failed
            first.
        congestion_control: of the hosts' TCP connections.
        setup_seconds, seconds: time to build the lab, and of the run.
    """

    exit_code: int = 0
    exit_codes: tuple[int, ...] = ()
    first_failed_rank: int | None = None
    congestion_control: str = ""
    setup_seconds: float = 0.0
    seconds: float = 0.0


class Job(msgspec.Struct, frozen=True):
    """What the launcher tells the lab's init, besides command and environment."""

    spec: LabSpec
    launcher_pid: int
    lifeline_fd: int
    report_fd: int
    grace_seconds: float
    timeout_seconds: float | None
    announce: bool
    hears_interrupt: bool
    samples: str | None = None


class Report(msgspec.Struct, frozen=True):
    """What the lab's init tells the launcher: how the run ended, or why there was none."""

    outcome: RunOutcome | None = None
    refused: str | None = None
    unusable: str | None = None
