"""Backward passes inside of others, as a reentrant checkpoint runs them, and the end of the outermost one.

Autograd's own callbacks come at the end of the pass that runs, which may be an inner one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from gradlane.live.session.hooks import inside_a_backward_pass


class _Inner(threading.local):
    passes = 0  # of this thread, inside of others


_inner = _Inner()
_waiting: list[Callable[[], None]] = []  # for the end of the outermost pass


def is_inner() -> bool:
    """Whether the backward pass that this thread runs is inside of another."""
    return _inner.passes > 0


def after_outermost(call: Callable[[], None]) -> None:
    """Call `call` when the outermost backward pass has ended, but not if an error ends it."""
    _waiting.append(call)


def watch_passes() -> None:
    """Patch the function by which torch runs every backward pass, once."""
    place: Any = torch.autograd
    really = place._engine_run_backward
    if getattr(really, "_of_gradlane", False):
        return

    @functools.wraps(really)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if inside_a_backward_pass():
            _inner.passes += 1
            try:
                return really(*args, **kwargs)
            finally:
                _inner.passes -= 1
        try:
            gradients = really(*args, **kwargs)
        except BaseException:
            _waiting.clear()
            raise
        while _waiting:
            _waiting.pop()()
        return gradients

    run_backward._of_gradlane = True  # type: ignore[attr-defined]
    place._engine_run_backward = run_backward
