"""Calls that wait for other ranks inside torch or native code, on threads of their own.

torch.distributed does not end a call because this process has heard that a rank is gone: it waits
for its own timeout. So whoever must not wait that long runs the call here, waits beside it, and
leaves it behind when the job has failed.

A call that is left behind needs the interpreter's lock when it ends. If that happens while the
interpreter is being finalised, the process aborts and its exit code is lost. So at exit such calls
are ended first: the sockets that they wait on are shut down (`process_groups` does that for its
groups, this module for the job's store).
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from gradlane.live.backends.sockets import ends_of, open_sockets, shut_down

Result = TypeVar("Result")

_END_S = 5.0  # for the calls to end at exit

_running: set[Call[Any]] = set()


class Call(Generic[Result]):
    """One call, begun by the constructor.

    Args:
        call: what to call.
        device: of the session. The call has the caller's stream on it.
        on_end: called when the call has ended, on its thread.
    """

    def __init__(self, call: Callable[[], Result], device: torch.device, on_end: Callable[[], None]) -> None:
        self._call, self._on_end = call, on_end
        # a new thread has the device's default stream
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        self._result: Result
        self._error: BaseException | None = None
        self.has_ended = False
        self.thread = threading.Thread(target=self._run, name="gradlane-call", daemon=True)
        _running.add(self)
        self.thread.start()

    def _run(self) -> None:
        try:
            if self._stream is not None:
                torch.accelerator.set_stream(self._stream)
            self._result = self._call()
        except BaseException as error:  # for whoever waits
            self._error = error
        _running.discard(self)
        self.has_ended = True
        self._on_end()

    def result(self) -> Result:
        """What the call returned, once it has ended; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result


def some_are_left() -> bool:
    """Whether a call has not ended."""
    return bool(_running)


def forget_all() -> None:
    """The process is about to end without finalising the interpreter: no call needs to be ended."""
    _running.clear()


def _end_all() -> None:
    """At exit: end the calls that wait for the job's store, and wait for all."""
    if not _running:
        return
    store: Any = None
    with contextlib.suppress(ValueError):  # the script has destroyed the process group
        store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    port = getattr(store, "port", None)
    for fd, _ in open_sockets():
        ends = ends_of(fd)
        if ends is not None and ends[1].endswith(f", {port})"):
            shut_down(fd)
    for call in list(_running):
        call.thread.join(_END_S)


# before every process group is opened, so that it runs after they have shut down their connections
atexit.register(_end_all)
