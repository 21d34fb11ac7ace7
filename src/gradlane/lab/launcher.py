"""The side of a lab that stays outside of it: starts the lab's init and hears from it how the run ended.

The caller may have any number of threads; the namespaces are made in a fresh process (`gradlane.lab.init`), since a
process with threads may not make a user namespace. That process dies with the thread that called.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache

import msgspec

from gradlane.errors import InputError, LabError
from gradlane.lab.kernel import WHAT_STILL_WORKS
from gradlane.lab.spec import INTERRUPTED, Job, LabSpec, Outcome, Report

GRACE_SECONDS = 10.0


def run(
    spec: LabSpec,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    grace: float = GRACE_SECONDS,
    announce: bool = False,
) -> int:
    """Run `command` once on each host of a lab and return the exit code; the arguments are those of `execute`."""
    return execute(spec, command, env=env, timeout=timeout, grace=grace, announce=announce).exit_code


def execute(
    spec: LabSpec,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    grace: float = GRACE_SECONDS,
    announce: bool = False,
) -> Outcome:
    """Run `command` once on each host of a lab and say how every rank ended.

    Rank 0 has this process's stdin, stdout and stderr; what the other ranks print comes on the same two streams,
    line by line, with "[rank] " before each. `env` replaces this process's environment; the variables that torchrun
    would set are added to it. When a rank fails, the others have `grace` seconds to end, then SIGTERM, then SIGKILL;
    the same happens after `timeout` seconds, without grace. Ctrl-C ends the ranks and gives exit code 130.
    `announce` prints a line about the lab on stderr before the ranks start.

    Raises `InputError` for a command that cannot be run and `LabError` for what the kernel refused.
    """
    environment = dict(os.environ if env is None else env)
    if not command:
        raise InputError("lab command: got none, expected a program and its arguments")
    _check_seconds("timeout", timeout)
    _check_seconds("grace", grace)
    program = command[0]
    if shutil.which(program, path=environment.get("PATH", os.defpath)) is None:
        raise InputError(f"lab command: got {program!r}, which is not a program that can be run; expected one on the PATH")
    outcome = _in_lab(spec, command, environment, timeout, grace, announce)
    assert outcome is not None  # a report without an outcome says why, and has been raised
    return outcome


@cache
def supported() -> str | None:
    """Why this machine cannot run a lab, or None where it can.

    Builds the smallest shaped lab that there is, which takes half a second, and asks once a process.
    """
    try:
        _in_lab(LabSpec(hosts=1, link_bits_per_second=10**9), [], dict(os.environ), None, GRACE_SECONDS, False)
    except LabError as error:
        return str(error)
    return None


def _check_seconds(name: str, value: float | None) -> None:
    if value is not None and not 0 <= value < 10**9:
        raise InputError(f"lab {name}: got {value}, expected seconds, zero or more")


def _in_lab(
    spec: LabSpec,
    command: Sequence[str],
    environment: dict[str, str],
    timeout: float | None,
    grace: float,
    announce: bool,
) -> Outcome | None:
    if sys.platform != "linux":
        raise LabError(f"a lab is made of Linux namespaces, and this is {sys.platform}; {WHAT_STILL_WORKS}")
    # in memory rather than a pipe, so that an interrupt while waiting can lose none of it
    report_fd = os.memfd_create("gradlane-lab-report")
    lifeline_read, lifeline_write = os.pipe()
    job = Job(
        spec=spec,
        launcher_pid=os.getpid(),
        lifeline_fd=lifeline_read,
        report_fd=report_fd,
        grace_seconds=grace,
        timeout_seconds=timeout,
        announce=announce,
    )
    text = msgspec.json.encode(job).decode()
    with open(report_fd, "rb") as report_stream, open(lifeline_write, "wb", buffering=0) as lifeline:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "gradlane.lab.init", text, *command],
                env=environment,
                pass_fds=(lifeline_read, report_fd),
            )
        finally:
            os.close(lifeline_read)
        interrupted = False
        try:
            process.wait()
        except KeyboardInterrupt:
            interrupted = True
            # to the init the end of the lifeline means: end the ranks, soon
            lifeline.close()
            try:
                process.wait()
            except KeyboardInterrupt:
                process.kill()
                process.wait()
                raise
        report_stream.seek(0)
        report_bytes = report_stream.read()
    if interrupted:
        # whatever the ranks made of it, and also where it came before there were any
        outcome = msgspec.json.decode(report_bytes, type=Report).outcome if report_bytes else None
        return msgspec.structs.replace(outcome or Outcome(), exit_code=INTERRUPTED)
    if not report_bytes:
        raise LabError(
            f"the process that holds the lab ended with status {process.returncode} and said nothing, expected a report; "
            "see whether something (such as the out-of-memory killer) killed it"
        )
    report = msgspec.json.decode(report_bytes, type=Report)
    if report.refused is not None:
        raise LabError(report.refused)
    if report.unusable is not None:
        raise InputError(report.unusable)
    return report.outcome
