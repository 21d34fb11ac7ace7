"""What a forked child, such as a worker of a DataLoader, inherits and cannot let go of.

Of native objects with a thread it has memory, and neither the thread nor consistent locks. Of a device it has nothing: to free
an event of the parent's ends the child. A child lets go of what it inherits when it collects garbage.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import weakref
from typing import Any, Protocol


class Threaded(Protocol):
    """Something around an object in native code that has a thread of its own."""

    @property
    def native(self) -> Any: ...


_threaded: weakref.WeakSet[Threaded] = weakref.WeakSet()


def spare_in_child(threaded: Threaded) -> None:
    """Run no destructor of `threaded.native` in a child that is forked from now on."""
    _threaded.add(threaded)


def _keep_all() -> None:
    for threaded in _threaded:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(threaded.native))


os.register_at_fork(after_in_child=_keep_all)


@functools.cache
def collect_nothing_inherited() -> None:
    """Let children that are forked from now on collect no garbage that they inherit. Once for a process.

    Their own garbage is collected as ever.
    """
    collects = True

    def before() -> None:
        nonlocal collects
        collects = gc.isenabled()
        gc.disable()  # other handlers run in the child before the one below

    def again() -> None:
        if collects:
            gc.enable()

    def in_child() -> None:
        gc.freeze()
        again()

    os.register_at_fork(before=before, after_in_parent=again, after_in_child=in_child)
