"""What a forked child inherits of native objects with a thread: memory, and neither the thread nor consistent locks."""

from __future__ import annotations

import ctypes
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
