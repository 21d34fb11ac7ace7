"""The side of a lab outside its namespaces: starts the lab's init and receives how the run ended.

The caller may have threads; a new process (`gradlane.lab.init`) makes the namespaces, since a
process with threads cannot create a user namespace. That process dies with the calling thread.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec

from gradlane import lifetime
from gradlane.errors import InputError, LabError
from gradlane.lab.kernel import WHAT_STILL_WORKS
from gradlane.lab.messages import Job, Report, RunOutcome
from gradlane.lab.spec import LabSpec

GRACE_SECONDS = 10.0


def run(
    spec: LabSpec,
    command: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    grace: float = GRACE_SECONDS,
    announce: bool = False,
    samples: str | Path | None = None,
    hears_interrupt: bool = True,
) -> int:
    """Run the jobs of a lab and return the exit code; arguments and errors as `execute`."""
    return execute(
        spec,
        command,
        env=env,
        timeout=timeout,
        grace=grace,
        announce=announce,
        samples=samples,
        hears_interrupt=hears_interrupt,
    ).exit_code


def execute(
    spec: LabSpec,
    command: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    grace: float = GRACE_SECONDS,
    announce: bool = False,
    samples: str | Path | None = None,
    hears_interrupt: bool = True,
) -> RunOutcome:
    """Run the jobs of a lab and return how every rank ended.

    Rank 0 has this process's stdin, stdout and stderr. Other ranks' lines come on the same two
    streams, each with "[rank] " before it. When a rank or a server fails, the others have `grace`
    seconds to end, then SIGTERM, then SIGKILL. Ctrl-C ends the ranks; the exit code is 130. Servers
    start and end with their job's ranks.

    Args:
        spec: hosts, links and jobs. Without jobs, one job runs `command` once on each host.
        command: what jobs without a command run.
        env: replaces this process's environment; the variables that torchrun would set are added.
        timeout: seconds after which the run is ended, without grace; None: no limit.
        grace: seconds, see above.
        announce: print a line about the lab on stderr before the ranks start.
        samples: a file for what every shaped link carried and queued, 20 times a second
            (`gradlane.lab.links.gauges`).
        hears_interrupt: whether the terminal's Ctrl-C reaches the ranks themselves; if not, SIGTERM
            ends them, nothing is said, and Ctrl-C is raised again when they have ended.

    Raises:
        InputError: the command cannot be run, or a time is negative.
        LabError: the kernel refused something.
        KeyboardInterrupt: Ctrl-C, without `hears_interrupt`.
    """
    environment = dict(os.environ if env is None else env)
    _check_seconds("timeout", timeout)
    _check_seconds("grace", grace)
    for job in spec.all_jobs:
        _check_command(job.command or command, environment)
        if job.server_command:
            _check_command(job.server_command, environment)
    if samples is not None and not spec.is_shaped:
        raise InputError("lab samples: got links that are not shaped, expected a rate: what is sampled is the shaping")
    if samples is not None:
        try:
            Path(samples).write_bytes(b"")
        except OSError as error:
            raise InputError(f"lab samples: got {str(samples)!r}, expected a file that can be written ({error})") from error
    outcome = _in_lab(spec, command, environment, timeout, grace, announce, samples, hears_interrupt)
    assert outcome is not None  # a report without an outcome was raised as an error above
    return outcome


@cache
def supported() -> str | None:
    """Why this machine cannot run a lab, or None if it can.

    The first call in a process builds the smallest shaped lab, which takes half a second.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    smallest = LabSpec(hosts=1, link_bits_per_second=10**9)
    try:
        _in_lab(smallest, [], dict(os.environ), None, GRACE_SECONDS, False, hears_interrupt=False)
    except LabError as error:
        return str(error)
    return None


def _check_command(command: Sequence[str], environment: Mapping[str, str]) -> None:
    if not command:
        raise InputError("lab command: got none, expected a program and its arguments")
    program = command[0]
    if shutil.which(program, path=environment.get("PATH", os.defpath)) is None:
        raise InputError(f"lab command: got {program!r}, which is not a program that can be run; expected one on the PATH")


def _ignore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait()
    except KeyboardInterrupt:
        process.kill()
        process.wait()
        raise


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
    samples: str | Path | None = None,
    hears_interrupt: bool = True,
) -> RunOutcome | None:
    if sys.platform != "linux":
        raise LabError(f"a lab is made of Linux namespaces, and this is {sys.platform}; {WHAT_STILL_WORKS}")
    # a file in memory, not a pipe, so that an interrupt while waiting loses nothing
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
        hears_interrupt=hears_interrupt and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
        samples=None if samples is None else str(Path(samples).absolute()),
    )
    # a file, since a spec may be longer than an argument
    job_fd = os.memfd_create("gradlane-lab-job")
    with (
        lifetime.interruptible(),
        open(job_fd, "wb", buffering=0) as job_stream,
        open(report_fd, "rb") as report_stream,
        open(lifeline_write, "wb", buffering=0) as lifeline,
    ):
        job_stream.write(msgspec.json.encode(job))
        job_stream.seek(0)
        process, interrupt = None, None
        try:
            try:
                lifetime.need_no_interrupt()
                with lifetime.held():
                    process = subprocess.Popen(
                        [sys.executable, "-m", "gradlane.lab.init", str(job_fd), *command],
                        env=environment,
                        pass_fds=(job_fd, lifeline_read, report_fd),
                        preexec_fn=_ignore_interrupt,
                    )
            finally:
                os.close(lifeline_read)
            process.wait()
        except KeyboardInterrupt as error:
            # init ends the ranks when the lifeline closes
            lifeline.close()
            if process is not None:
                _wait_or_kill(process)
            if not hears_interrupt:
                raise
            interrupt = error
        report_stream.seek(0)
        report_bytes = report_stream.read()
    if interrupt is not None:
        # whatever the ranks' exit codes are, and even if none had started
        outcome = msgspec.json.decode(report_bytes, type=Report).outcome if report_bytes else None
        return msgspec.structs.replace(outcome or RunOutcome(), exit_code=128 + lifetime.signal_of(interrupt))
    if not report_bytes:
        assert process is not None
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
