"""Starts a lab's processes, passes on what they print, and ends them when one fails.

Runs in the only thread of the lab's init (PID 1 of its namespace), in one loop around a selector,
and never blocks on a rank. The kernel kills what ranks leave behind when init ends.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, NamedTuple

from gradlane.errors import InputError, LabError
from gradlane.lab import kernel
from gradlane.lab.links.wires import Wires
from gradlane.lab.messages import INTERRUPTED, TIMED_OUT, Job
from gradlane.lab.processes import Process
from gradlane.lifetime import exit_code_of

_LONGEST_LINE_BYTES = 1 << 16
# after Ctrl-C, ranks have the terminal's SIGINT already; they may take this long to end
_INTERRUPT_SECONDS = 0.5
_TERMINATE_SECONDS = 3.0
_SERVERS_SECONDS = 2.0


class Exits(NamedTuple):
    """How the ranks ended, with the fields of `messages.RunOutcome`."""

    exit_codes: tuple[int, ...]
    exit_code: int
    first_failed_rank: int | None


def run(job: Job, everything: Sequence[Process], helpers: dict[int, str], wires: Wires) -> Exits:
    """Start every process, and return when all ranks have ended.

    Args:
        job: what the launcher asked for.
        everything: the processes.
        helpers: the lab's own processes, which run already: by process id, what each is for.
        wires: the network.
    """
    with selectors.DefaultSelector() as selector:
        watch = _Watch(job, selector, sum(process.rank is not None for process in everything))
        for pid, title in helpers.items():
            watch.mind(pid, title)
        for process in everything:
            watch.start(process, wires)
        return watch.until_all_ended()


class _Pipe:
    """One output stream of one rank; passes on whole lines with the rank's prefix, or all without
    one.

    Only init writes ranks' lines to the target, so lines do not mix.
    """

    def __init__(self, stream: IO[bytes], prefix: bytes, target_fd: int) -> None:
        self._stream = stream  # kept, as it owns the descriptor
        self.fd = stream.fileno()
        os.set_blocking(self.fd, False)
        self._prefix = prefix
        self._target_fd = target_fd
        self._unfinished = b""

    def pump(self) -> bool:
        """Pass on what is available; False at the end of the stream."""
        while True:
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, self._unfinished = (self._unfinished + data).split(b"\n")
            self._write(b"".join(b"%s%s\n" % (self._prefix, line) for line in lines))
            if len(self._unfinished) > _LONGEST_LINE_BYTES:
                self.flush()

    def flush(self) -> None:
        """Pass on a last line without a newline."""
        if self._unfinished:
            self._write(b"%s%s%s" % (self._prefix, self._unfinished, b"\n" if self._prefix else b""))
            self._unfinished = b""

    def _write(self, rest: bytes) -> None:
        while rest:
            try:
                rest = rest[os.write(self._target_fd, rest) :]
            except BlockingIOError:
                # some program has set the terminal to non-blocking
                _wait_until_writable(self._target_fd)
            except OSError:
                # nobody reads; the ranks continue
                return


def _wait_until_writable(fd: int) -> None:
    with selectors.PollSelector() as selector:
        selector.register(fd, selectors.EVENT_WRITE)
        selector.select()


class _Running(NamedTuple):
    process: Process
    popen: subprocess.Popen[bytes]

    @property
    def is_server(self) -> bool:
        return self.process.environment.get("GRADLANE_LAB_ROLE") == "server"


class _Watch:
    """The running processes, and what is to happen to them at which time."""

    def __init__(self, job: Job, selector: selectors.BaseSelector, ranks: int) -> None:
        self._job = job
        self._selector = selector
        self._running: list[_Running] = []
        self._pipes: list[_Pipe] = []
        self._exit_codes = [0] * ranks
        self._first_failure = ""
        self._first_failed: int | None = None
        self._exit_code: int | None = None  # by what comes first: a failure, the timeout or an interrupt
        self._signals: list[tuple[float, signal.Signals]] = []  # what to send to the remaining processes, and when
        self._signalled = False
        self._time_is_up = None if job.timeout_seconds is None else time.monotonic() + job.timeout_seconds
        selector.register(job.lifeline_fd, selectors.EVENT_READ, self._on_lifeline)

    def mind(self, pid: int, title: str) -> None:
        """Watch a helper: its failure is a failure of the lab."""
        pidfd = os.pidfd_open(pid)

        def on_exit() -> None:
            self._forget(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code:
                self._fail(title, None, code)

        self._selector.register(pidfd, selectors.EVENT_READ, on_exit)

    def start(self, process: Process, wires: Wires) -> None:
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", "1")
        # as torchrun's `python -u`: lines come when they are printed
        environment.setdefault("PYTHONUNBUFFERED", "1")
        environment.update(process.environment)
        # only the first rank may use the terminal
        first = process.prefix is None
        inherits_out, inherits_err = (first and os.isatty(fd) for fd in (1, 2))
        host = process.host

        def enter_host() -> None:
            kernel.setns(wires.namespace_fds[host], kernel.CLONE_NEWNET)
            kernel.unshare(kernel.CLONE_NEWUTS)
            socket.sethostname(f"host{host}")
            if self._job.hears_interrupt:
                signal.signal(signal.SIGINT, signal.SIG_DFL)

        try:
            popen = subprocess.Popen(
                process.command,
                env=environment,
                stdin=None if first else subprocess.DEVNULL,
                stdout=None if inherits_out else subprocess.PIPE,
                stderr=None if inherits_err else subprocess.PIPE,
                preexec_fn=enter_host,
            )
        except OSError as error:
            raise InputError(f"lab command: {process.command[0]!r} cannot be run ({error}), expected a program") from error
        except subprocess.SubprocessError as error:
            raise LabError(f"{process.title} could not enter its host ({error}); {kernel.WHAT_STILL_WORKS}") from error
        running = _Running(process, popen)
        self._running.append(running)
        pidfd = os.pidfd_open(popen.pid)
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._on_exit(running, pidfd))
        prefix = (process.prefix or "").encode()
        for stream, target_fd in ((popen.stdout, 1), (popen.stderr, 2)):
            if stream is not None:
                pipe = _Pipe(stream, prefix, target_fd)
                self._pipes.append(pipe)
                self._selector.register(pipe.fd, selectors.EVENT_READ, lambda pipe=pipe: self._on_output(pipe))

    def until_all_ended(self) -> Exits:
        while self._ranks_left():
            self._wait(None)
        # servers end when their job has; the kernel ends the rest with this process
        until = time.monotonic() + _SERVERS_SECONDS
        while time.monotonic() < until and any(running.is_server for running in self._running):
            self._wait(until)
        for pipe in self._pipes:
            pipe.pump()
            pipe.flush()
        return Exits(tuple(self._exit_codes), self._exit_code or 0, self._first_failed)

    def _ranks_left(self) -> list[str]:
        return [str(running.process.rank) for running in self._running if running.process.rank is not None]

    def _wait(self, until: float | None) -> None:
        """Wait for the next event, until `until`."""
        times = [when for when, _ in self._signals[:1]]
        times += [when for when in (self._time_is_up, until) if when is not None]
        for key, _ in self._selector.select(max(min(times) - time.monotonic(), 0.0) if times else None):
            key.data()
        self._keep_time()

    def _on_output(self, pipe: _Pipe) -> None:
        if not pipe.pump():
            self._selector.unregister(pipe.fd)

    def _forget(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)

    def _on_exit(self, running: _Running, pidfd: int) -> None:
        self._forget(pidfd)
        self._running.remove(running)
        status = running.popen.wait()
        code = exit_code_of(status)
        rank = running.process.rank
        if rank is not None:
            self._exit_codes[rank] = code
        ended_from_outside = self._exit_code is not None and not self._first_failure
        # once all ranks have ended, other processes may end in any way
        if code == 0 or self._signalled or ended_from_outside or not (rank is not None or self._ranks_left()):
            return
        if status == -signal.SIGINT:
            # the terminal's Ctrl-C, which the launcher gets too
            self._interrupt()
            return
        self._fail(running.process.title, rank, status)

    def _fail(self, title: str, rank: int | None, status: int) -> None:
        """Handle a failure: the first one decides the exit code and gives the others time to end."""
        how = f"was ended by {_signal_name(-status)}" if status < 0 else f"ended with exit code {status}"
        if self._first_failure:
            _say(f"{title} {how}, after {self._first_failure}")
            return
        self._first_failure = title.partition(" (")[0]
        self._first_failed, self._exit_code = rank, exit_code_of(status)
        grace = self._job.grace_seconds
        _say(f"{title} {how}" + (f"; the others have {grace:g} s to end" if self._running else ""))
        self._end_the_rest(grace)

    def _on_lifeline(self) -> None:
        self._selector.unregister(self._job.lifeline_fd)
        self._interrupt()

    def _interrupt(self) -> None:
        if self._exit_code is None:
            self._exit_code = INTERRUPTED
            if self._job.hears_interrupt:
                _say("interrupted; ending all ranks")
        self._time_is_up = None
        self._end_the_rest(_INTERRUPT_SECONDS)

    def _keep_time(self) -> None:
        now = time.monotonic()
        if self._time_is_up is not None and now >= self._time_is_up:
            self._time_is_up = None
            if self._exit_code is None:
                self._exit_code = TIMED_OUT
            left = ", ".join(self._ranks_left())
            _say(f"the time of {self._job.timeout_seconds:g} s is up with rank {left} still running; ending")
            self._end_the_rest(0.0)
        while self._signals and now >= self._signals[0][0]:
            _, number = self._signals.pop(0)
            self._signalled = True
            for running in self._running:
                running.popen.send_signal(number)

    def _end_the_rest(self, grace_seconds: float) -> None:
        terminate = time.monotonic() + grace_seconds
        self._signals = [(terminate, signal.SIGTERM), (terminate + _TERMINATE_SECONDS, signal.SIGKILL)]


def _say(text: str) -> None:
    print(f"gradlane lab: {text}", file=sys.stderr, flush=True)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
