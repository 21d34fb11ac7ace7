"""Gpu: what CUDA graphs and CUDA streams do past every guard.

A graph reads parameters without Python, and replays call no hook. A stream that the script makes wait for
another one expects that what `step()` has queued there is done, deferred updates too. The patched methods of
torch.cuda make the deferred updates of all sessions first.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NoReturn, Protocol

import torch

from gradlane.errors import UnsupportedError
from gradlane.live.backends.streams import stream_of
from gradlane.live.comm.turn import in_turn
from gradlane.live.session.deferred_step import DeferredStep
from gradlane.live.session.torch_actions import TorchActions
from gradlane.live.session.updates import Updates

_everywhere: weakref.WeakSet[Gpu] = weakref.WeakSet()


class Fail(Protocol):
    """Raises an error of a kind, and tells the other ranks."""

    def __call__(self, text: str, kind: type[UnsupportedError]) -> NoReturn: ...


class Gpu:
    """One session's model on a GPU; on anything else it does nothing.

    Args:
        device: of the model.
        updates, actions: the session's deferred updates, and what makes them.
        fail: see `Fail`.
    """

    def __init__(
        self,
        device: torch.device,
        updates: Updates[DeferredStep],
        actions: TorchActions,
        fail: Fail,
    ) -> None:
        self._is_there = device.type == "cuda"
        self._updates, self._actions, self._fail = updates, actions, fail
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
        self._updates.settle()

    def before_wait(self, waiting: torch.Stream) -> bool:
        """The stream `waiting` is about to wait for another: make all deferred updates, unless they run on `waiting`.

        Returns:
            Whether there were any.
        """
        if not self._updates or self._actions.home == stream_of(waiting):
            return False
        self._make_at_home()
        self._updates.settle()
        return True

    @in_turn
    def _make_at_home(self) -> None:
        if self._updates and self._actions.is_elsewhere:
            self._actions.make_at_home(self._updates.make_all)


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
