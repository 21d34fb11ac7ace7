"""What this process starts ends with it, however it ends: processes, and a temporary folder.

An exception or a signal that can be handled unwinds `Children` and `scratch_folder`. After SIGKILL no code of this process
runs. The kernel then kills its children (PR_SET_PDEATHSIG), and a shell that reads from a pipe of this process removes the
folder when the pipe closes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_STARTER = "GRADLANE_STARTED_BY"  # environment variable of a process: the one that started it
_libc = ctypes.CDLL(None, use_errno=True)  # before a fork: a child of threads may not load anything
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 40.0  # torchrun gives ranks 30 s after SIGTERM before it kills them
_PR_SET_PDEATHSIG = 1
# a rank that is being killed may still write, so that a folder is not empty when rm comes to it
_REMOVE = """
trap '' HUP INT TERM QUIT
read -r _
for _ in 1 2 3 4 5 6 7 8 9; do rm -rf -- "$1" && exit; sleep 0.2; done
"""


# -- signals ---------------------------------------------------------------------------------------


class Interrupted(KeyboardInterrupt):
    """A signal asks this process to end.

    Attributes:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = signal.Signals(number)


def signal_of(interrupt: KeyboardInterrupt) -> signal.Signals:
    """Which signal an exception stands for; SIGINT where it does not say."""
    return interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT


def exit_code_of(status: int) -> int:
    """The exit code of a command whose process ended so, as shells have it: 128 + N where signal N ended it.

    Args:
        status: as `Popen.wait` returns it.
    """
    return 128 - status if status < 0 else status


class _Hold:
    """While entered, signals of `interruptible` are noted; the last exit raises the first of them."""

    def __init__(self) -> None:
        self._depth = 0
        self._came: int | None = None
        self.blocks = 0  # of `interruptible`, one in another
        self.raised: int | None = None  # since the outermost of them began

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.raised = self.raised or number
        if not self._depth:
            raise Interrupted(number)
        self._came = self._came or number

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._depth -= 1
        if not self._depth and self._came is not None:
            number, self._came = self._came, None
            raise Interrupted(number)


_hold = _Hold()


@contextmanager
def interruptible(signals: Sequence[signal.Signals] = _ENDING) -> Iterator[None]:
    """Have signals raise `Interrupted` inside of the block.

    A signal that is ignored (nohup, a shell's background job) or has a handler stays as it is. If the caller is not
    the main thread, all of them stay.

    Args:
        signals: which; default: SIGINT, SIGTERM and SIGHUP.
    """
    if not _is_main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signals}
    before = {number: old for number, old in before.items() if old in (signal.SIG_DFL, signal.default_int_handler)}
    try:
        with _hold:
            _hold.blocks += 1
            if _hold.blocks == 1:
                _hold.raised = None
            for number in before:
                signal.signal(number, _hold.on_signal)
        yield
    finally:
        with _hold:
            _hold.blocks -= 1
            for number, old in before.items():
                signal.signal(number, old)


def need_no_interrupt() -> None:
    """Raise again what was raised in this block of `interruptible`: after an interrupt nothing more is started.

    Python drops an exception that a handler raises while a callback of the garbage collector or of an import runs.
    """
    if _is_main_thread() and _hold.blocks and _hold.raised is not None:
        raise Interrupted(_hold.raised)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Have Ctrl-C end this process as it is, with one line: for imports.

    Nothing has been started then. An exception could be dropped there, and aborts the process where it passes through C++
    code that torch's import runs.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, b"gradlane: interrupted\n")
        os._exit(128 + number)

    before = signal.getsignal(signal.SIGINT)
    if not _is_main_thread() or before not in (signal.default_int_handler, _hold.on_signal):
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def held() -> Iterator[None]:
    """Put off Ctrl-C, and the other signals of `interruptible`, to the end of the block.

    For what must not stop halfway: a process that is started and not yet noted would be left.
    """
    if not _is_main_thread():
        yield
        return
    with interruptible((signal.SIGINT,)), _hold:
        yield


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


# -- processes -------------------------------------------------------------------------------------


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends; nothing where the kernel is not Linux.

    Raises:
        OSError: the kernel refuses it.
    """
    if sys.platform != "linux":
        return
    if _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def starter() -> Iterator[None]:
    """Tell processes that are started inside of the block who starts them, for `end_with_starter`.

    For those that `Children` does not start: torchrun's, and one that must not fork a large process.
    """
    os.environ[_STARTER] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(_STARTER, None)


def end_with_starter() -> None:
    """End this process with the one that started it inside of `starter`, if one did."""
    number = os.environ.pop(_STARTER, None)
    if number is None:
        return
    die_with_parent()
    if os.getppid() != int(number):  # it ended before the call
        os._exit(128 + signal.SIGKILL)


class Children:
    """Processes that end with the block: SIGTERM, and SIGKILL after 40 s or at the next interrupt.

    Each is killed with this process. The kernel sees the end of a thread: one that starts a process has to last as
    long as that.
    """

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []
        self._signals = interruptible()

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process that ignores Ctrl-C.

        Args:
            command, options: as for `subprocess.Popen`.
        """
        parent = os.getpid()

        def prepare() -> None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            die_with_parent()
            if os.getppid() != parent:
                os._exit(128 + signal.SIGKILL)

        need_no_interrupt()
        with held():
            process = subprocess.Popen(command, preexec_fn=prepare, **options)
            self._running.append(process)
        return process

    def __enter__(self) -> Children:
        self._signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        until = time.monotonic() + _GRACE_S
        try:
            for process in self._running:
                process.terminate()
            for process in self._running:
                process.wait(max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                with held():
                    for process in self._running:
                        process.kill()
                    for process in self._running:
                        process.wait()
            finally:
                self._signals.__exit__(None, None, None)


# -- the folder ------------------------------------------------------------------------------------


@contextmanager
def scratch_folder() -> Iterator[str]:
    """A temporary folder that goes with the block, or with this process; yields its path."""
    folder, remover = "", None
    with interruptible():
        try:
            with held():
                folder = tempfile.mkdtemp(prefix="gradlane-")
                remover = _start_remover(folder)
            yield folder
        finally:
            # here too: Ctrl-C may have ended the remover in the moment before it had a session of its own
            shutil.rmtree(folder, ignore_errors=True)
            if remover is not None:
                assert remover.stdin is not None
                remover.stdin.close()
                remover.wait()


def _start_remover(folder: str) -> subprocess.Popen[bytes]:
    # in a session of its own it hears no Ctrl-C, and it holds none of the streams that others read to their end
    return subprocess.Popen(
        ["/bin/sh", "-c", _REMOVE, "gradlane-remove", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
