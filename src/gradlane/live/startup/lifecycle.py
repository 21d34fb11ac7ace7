"""Ending: the sessions of this process, closed when it ends in order, and aborted when it does not."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import Any, Protocol

import torch


class AttachedSession(Protocol):
    """What is attached to a model, until it is closed."""

    model: torch.nn.Module

    @property
    def closed(self) -> bool: ...

    @property
    def failed(self) -> bool: ...

    def abort(self, error: BaseException) -> None: ...

    def close(self) -> None: ...


_sessions: weakref.WeakKeyDictionary[torch.nn.Module, AttachedSession] = weakref.WeakKeyDictionary()


def session_of(model: torch.nn.Module) -> AttachedSession | None:
    """The session that is attached to `model` now."""
    session = _sessions.get(model)
    return None if session is None or session.closed else session


def keep(session: AttachedSession) -> None:
    """End `session` when this process ends."""
    _sessions[session.model] = session
    _tell_others_on_a_crash()
    atexit.register(_close_at_exit, weakref.ref(session))


def forget(session: AttachedSession) -> None:
    """A session holds its model, which must not be held for good; one that failed decides how the process ends."""
    if not session.failed:
        _sessions.pop(session.model, None)


def _close_at_exit(reference: weakref.ref[AttachedSession]) -> None:
    session = reference()
    if session is not None:
        session.close()


def _end_at_once(code: int) -> None:
    """The last thing of a process that failed: end without finalising the interpreter.

    Sums are stuck in torch.distributed. As the other ranks end, its threads report that to Python, and a
    process whose interpreter is finalised just then is aborted (SIGABRT, in place of the exit code).
    """
    atexit.unregister(_end_at_once)
    atexit._run_exitfuncs()  # everybody else's
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _tell_others_on_a_crash() -> None:
    """An exception that ends this process is told to the other ranks, in its own words, before it is printed."""
    before = sys.excepthook
    if getattr(before, "_of_gradlane", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        for session in list(_sessions.values()):
            session.abort(error)
        before(kind, error, trace)
        if any(session.failed for session in _sessions.values()):
            atexit.register(_end_at_once, 130 if issubclass(kind, KeyboardInterrupt) else 1)

    hook._of_gradlane = True  # type: ignore[attr-defined]
    sys.excepthook = hook
