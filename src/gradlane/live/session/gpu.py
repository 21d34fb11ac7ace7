"""Gpu: what CUDA graphs and CUDA streams do past the guards of `guards.py`.

A graph reads parameters without Python, and replays call no hook. A stream that the script makes wait for
another one expects that what `step()` has queued there is done, deferred updates too. The patched methods of
torch.cuda make the deferred updates of all sessions first.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch

from gradlane.errors import UnsupportedError
from gradlane.live.backends.streams import Streams, stream_of
from gradlane.live.comm.turn import in_turn
from gradlane.live.session.deferred_updates import DeferredUpdates

_everywhere: weakref.WeakSet[Gpu] = weakref.WeakSet()


class Fail(Protocol):
    """Raises an error of a kind, and tells the other ranks."""

    def __call__(self, text: str, kind: type[UnsupportedError]) -> NoReturn: ...


class Gpu:
    """One session's model on a GPU; on anything else it does nothing.

    Args:
        device: of the model.
        streams: of `device`; None for the CPU.
        deferred: the session's deferred updates.
        settle: waits for every sum and makes all deferred updates.
        fail: see `Fail`.
    """

    def __init__(
        self,
        device: torch.device,
        streams: Streams | None,
        deferred: DeferredUpdates,
        settle: Callable[[], None],
        fail: Fail,
    ) -> None:
        self._is_there = device.type == "cuda"
        self._streams, self._deferred, self._settle, self._fail = streams, deferred, settle, fail
        if self._is_there:
            _everywhere.add(self)
            _patch()

    def close(self) -> None:
        """The session has ended."""
        _everywhere.discard(self)

    @property
    def is_captured(self) -> bool:
        """Whether what runs now is captured into a CUDA graph."""
        return self._is_there and torch.cuda.is_current_stream_capturing()

    def refuse_capture(self, what: str) -> None:
        """Fail if `what`, which sums or uses sums, is captured."""
        if self.is_captured:
            self._fail(
                f"{what} is captured into a CUDA graph, whose replays call nothing of Python: gradients would not be summed. "
                "Capture parts of the model by torch.cuda.make_graphed_callables before attach, or the evaluation alone",
                UnsupportedError,
            )

    def before_graph(self) -> None:
        """A graph is about to be captured or replayed: make all deferred updates, and take all guards off."""
        self._make_at_home()
        self._settle()

    def before_wait(self, waiting: torch.Stream) -> bool:
        """The stream `waiting` is about to wait for another: make all deferred updates, unless they run on `waiting`.

        Returns:
            Whether there were any.
        """
        home = self._deferred.home
        if not self._deferred or home == stream_of(waiting):
            return False
        self._make_at_home()
        self._settle()
        return True

    @in_turn
    def _make_at_home(self) -> None:
        if self._deferred and self._streams is not None and self._streams.scripts() != self._deferred.home:
            self._deferred.make_all_current_at_home()


def _patch() -> None:
    """Patch torch.cuda, once."""
    _before_graph(torch.cuda.CUDAGraph, "capture_begin")
    _before_graph(torch.cuda.CUDAGraph, "replay")
    # `Stream.wait_event` and `Stream.wait_stream` call it; a `torch.Stream`, which is immutable, does not
    really: Any = torch.cuda.Event.wait
    if getattr(really, "_of_gradlane", False):
        return

    @functools.wraps(really)
    def wait(event: Any, stream: Any = None) -> None:
        waiting = torch.cuda.current_stream() if stream is None else stream
        made = [gpu.before_wait(waiting) for gpu in list(_everywhere)]
        current = torch.cuda.current_stream()
        if any(made) and waiting != current:
            really(current.record_event(), waiting)  # `event` may be older than the updates
        really(event, stream)

    patched: Any = wait
    patched._of_gradlane = True
    torch.cuda.Event.wait = patched  # type: ignore[method-assign]


def _before_graph(kind: Any, name: str) -> None:
    really = getattr(kind, name)
    if getattr(really, "_of_gradlane", False):
        return

    @functools.wraps(really)
    def call(*args: Any, **kwargs: Any) -> Any:
        for gpu in list(_everywhere):
            gpu.before_graph()
        return really(*args, **kwargs)

    patched: Any = call
    patched._of_gradlane = True
    setattr(kind, name, patched)
