"""Lifecycle: closes the sessions of this process when it ends, and aborts them when an exception
ends it.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from gradlane.live.backends import calls


class AttachedSession(Protocol):
    """A session of any kind, as the end of a process needs it."""

    model: torch.nn.Module

    @property
    def closed(self) -> bool: ...

    @property
    def failed(self) -> bool: ...

    @property
    def summed(self) -> Sequence[tuple[str, torch.nn.Parameter]]: ...

    def abort(self, error: BaseException) -> None: ...

    def leave(self, error: SystemExit) -> None: ...

    def close(self) -> None: ...


_sessions: weakref.WeakKeyDictionary[torch.nn.Module, AttachedSession] = weakref.WeakKeyDictionary()


_attach_failed = False


def session_of(model: torch.nn.Module) -> AttachedSession | None:
    """The open session of `model`, or None."""
    session = _sessions.get(model)
    return None if session is None or session.closed else session


def sharing_with(model: torch.nn.Module, trained: Iterable[torch.nn.Parameter]) -> tuple[AttachedSession, str] | None:
    """Find an open session of another model that has one of the parameters `trained`.

    Returns:
        The session, and the name of the parameter in its model; None if there is none.
    """
    ids = {id(param) for param in trained}
    for session in list(_sessions.values()):
        if session.model is model or session.closed:
            continue
        for name, param in session.summed:
            if id(param) in ids:
                return session, name
    return None


def keep(session: AttachedSession) -> None:
    """Close `session` when this process ends; abort it if an exception ends the process."""
    _sessions[session.model] = session
    _tell_others_on_a_crash()
    atexit.register(_close_at_exit, weakref.ref(session))
    if multiprocessing.parent_process() is not None:  # where `multiprocessing` has forked, it runs its own functions only
        multiprocessing.util.Finalize(None, _close_at_exit, (weakref.ref(session),), exitpriority=1)


def forget(session: AttachedSession) -> None:
    """Release a closed session, and with it its model. One that failed stays: it decides how the
    process ends.
    """
    if not session.failed:
        _sessions.pop(session.model, None)


def attach_failed() -> None:
    """If the error that is about to leave `attach` ends the process, end it at once."""
    global _attach_failed
    _attach_failed = True
    _tell_others_on_a_crash()


def _close_at_exit(reference: weakref.ref[AttachedSession]) -> None:
    session = reference()
    if session is not None:
        session.close()


def _end_at_once(code: int) -> None:
    """End a process that failed with exit code `code`, without finalising the interpreter.

    Some sums and calls in torch.distributed never end. When the other ranks end, its threads call
    Python with their errors, and a process whose interpreter is being finalised then aborts: it
    dies by SIGABRT and not with `code`. Finalising also takes seconds.
    """
    atexit.unregister(_end_at_once)
    calls.forget_all()
    atexit._run_exitfuncs()  # all other exit functions
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fail_all(error: BaseException) -> None:
    """End all sessions of this process, and soon the process, because of `error`; tell the other ranks."""
    _abort_all(error)
    _end_at_once_if_failed(error)


def leave_all(error: SystemExit) -> None:
    """The script ends this process by `error`, whose code is not 0."""
    for session in list(_sessions.values()):
        session.leave(error)
    _end_at_once_if_failed(error)


def _abort_all(error: BaseException) -> None:
    """Tell the other ranks of all sessions that this one failed with `error`."""
    for session in list(_sessions.values()):
        session.abort(error)


def _end_at_once_if_failed(error: BaseException) -> None:
    if _attach_failed or any(session.failed for session in _sessions.values()):
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code
        atexit.register(_end_at_once, code)


def _tell_others_on_a_crash() -> None:
    """Install an excepthook that sends the exception's text to the other ranks before it is printed
    here.
    """
    before = sys.excepthook
    if getattr(before, "_of_gradlane", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        _abort_all(error)
        before(kind, error, trace)
        _end_at_once_if_failed(error)

    hook._of_gradlane = True  # type: ignore[attr-defined]
    sys.excepthook = hook
