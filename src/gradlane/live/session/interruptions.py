"""Interruptions: signal handlers of the script, which may run between any two lines of a session, and forks.

A handler may save a checkpoint, as Slurm and Lightning ask for it by SIGUSR1. Where it interrupts a session that changes what
it knows, or an optimizer from which gradients are hidden, it would see parameters of two steps at once. So it runs a little
later. The signal is sent again until the main thread is in the script's code or waits for a sum; all parameters are of one step
there.

A child process that was forked has the memory of its parent and none of its threads. Before a fork, deferred updates are made
in all sessions; in the child each session is detached from its model, which then has ordinary tensors.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal.getsignal` takes twenty times as long
import _thread
import contextlib
import functools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from gradlane.errors import JobError
from gradlane.live.comm.turn import is_here, turn
from gradlane.live.session.deferred_step import is_stepping

_AGAIN_S = 0.001  # until a signal that came too early is sent again
# their handlers have to run at once, or measure where the program is
_AT_ONCE = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGPROF", "SIGKILL", "SIGSTOP"}
_SIGNALS = tuple(number for number in signal.valid_signals() if getattr(number, "name", "") not in _AT_ONCE)
_sent_again: set[int] = set()


class Interruptible(Protocol):
    """A session, as signal handlers and forks concern it."""

    def is_busy_here(self) -> bool:
        """Whether the calling thread is in the middle of a change of what other threads of the session share."""

    def before_fork(self) -> None:
        """Make all deferred updates."""

    def in_child(self) -> None:
        """Detach from the model, in a child process that has no other thread."""


_sessions: weakref.WeakSet[Interruptible] = weakref.WeakSet()
_handlers: list[Any] = []  # as they were found last, by place in `_SIGNALS`


def add(session: Interruptible) -> None:
    """Let `session` hear of forks, and let no signal handler interrupt it."""
    _sessions.add(session)
    wrap_handlers()


def discard(session: Interruptible) -> None:
    """`session` has ended. After the last one, signals have the script's own handlers again, if this is the main thread."""
    _sessions.discard(session)
    if not _sessions and threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            found = _signal.getsignal(number)
            if isinstance(found, _Later):
                signal.signal(number, found.handler)
        _handlers.clear()


def wrap_handlers() -> None:
    """Make handlers wait that the script has set since the last call: 1.4 us if there are none."""
    found = [_signal.getsignal(number) for number in _SIGNALS]
    if found == _handlers or threading.current_thread() is not threading.main_thread():
        return
    for number, handler in zip(_SIGNALS, found, strict=True):
        # Ctrl-C ends the job; a handler of the script's own for it may do anything
        if callable(handler) and handler is not signal.default_int_handler and not isinstance(handler, _Later):
            signal.signal(number, _Later(handler))
    _handlers[:] = [_signal.getsignal(number) for number in _SIGNALS]


class _Later:
    """A signal handler that waits until no session is in the middle of something.

    Args:
        handler: the script's.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        functools.update_wrapper(self, handler, updated=())

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if not _is_busy(frame):
            return self.handler(number, frame)
        if number not in _sent_again:
            _sent_again.add(number)
            _thread.start_new_thread(_send_again, (number,))  # threading's own start may be what was interrupted
        return None


def _is_busy(frame: FrameType | None) -> bool:
    return is_here() or any(session.is_busy_here() for session in list(_sessions)) or (bool(_sessions) and is_stepping(frame))


def _send_again(number: int) -> None:
    time.sleep(_AGAIN_S)
    _sent_again.discard(number)
    main = threading.main_thread().ident
    if main is not None and not sys.is_finalizing():
        signal.pthread_kill(main, number)


# -- forks ---------------------------------------------------------------------------------------------


def _before_fork() -> None:
    try:
        for session in list(_sessions):
            with contextlib.suppress(JobError):  # the child refuses to read what lacks its update
                session.before_fork()
    finally:
        turn.acquire()  # a thread that had it would be missing in the child


def _in_parent() -> None:
    turn.release()


def _in_child() -> None:
    turn.release()
    for session in list(_sessions):
        session.in_child()
    _sessions.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
