"""The turn: one thread of a process at a time changes what its sessions know of their parameters.

A thread that reads a parameter (an evaluation, a checkpoint) may be the first to need its deferred update. It takes the turn,
makes the update, and takes the guard off last, so that no other thread sees a value in between. Nobody keeps the turn while
waiting for other ranks: a sum that one thread waits for may need a gradient that another thread has yet to produce. Whoever
has waited therefore looks again at what it knew.

There is one turn for all sessions, since an optimizer may belong to several of them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])

turn: Any = threading.RLock()


def is_here() -> bool:
    """Whether the calling thread has the turn."""
    return bool(turn._is_owned())


def in_turn(method: Method) -> Method:
    """Let `method` have the turn while it runs."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with turn:
            return method(*args, **kwargs)

    return cast(Method, call)


@contextmanager
def given_up() -> Iterator[None]:
    """Let other threads have the turn within, however often this thread has taken it."""
    if not turn._is_owned():
        yield
        return
    taken = turn._release_save()
    try:
        yield
    finally:
        turn._acquire_restore(taken)
