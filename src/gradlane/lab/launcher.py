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
from gradlane.lab.spec import Job, LabSpec, Outcome, Report

GRACE_SECONDS = 10.0


def run(
    spec: LabSpec,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    grace: float = GRACE_SECONDS,
    announce: bool = False,
) -> Outcome:
    """Run `command` once on each host of a lab and say how every rank ended; `.exit_code` sums it up.

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
    report_read, report_write = os.pipe()
    lifeline_read, lifeline_write = os.pipe()
    job = Job(
        spec=spec,
        launcher_pid=os.getpid(),
        lifeline_fd=lifeline_read,
        report_fd=report_write,
        grace_seconds=grace,
        timeout_seconds=timeout,
        announce=announce,
    )
    text = msgspec.json.encode(job).decode()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "gradlane.lab.init", text, *command],
            env=environment,
            pass_fds=(lifeline_read, report_write),
        )
    except BaseException:
        os.close(report_read)
        os.close(lifeline_write)
        raise
    finally:
        os.close(lifeline_read)
        os.close(report_write)
    with open(report_read, "rb") as report_stream, open(lifeline_write, "wb", buffering=0) as lifeline, process:
        try:
            # the init holds the other end until it ends, so that this waits for the run
            report_bytes = report_stream.read()
            process.wait()
        except KeyboardInterrupt:
            # to the init the end of the lifeline means: end the ranks, soon
            lifeline.close()
            try:
                report_bytes = report_stream.read()
                process.wait()
            except KeyboardInterrupt:
                process.kill()
                raise
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
