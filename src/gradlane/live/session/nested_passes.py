"""Backward passes inside of others, as a reentrant checkpoint runs them.

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
    def __init__(self) -> None:
        # for each inner pass of this thread that runs: what to call when the pass around it runs again
        self.passes: list[list[Callable[[], None]]] = []


_inner = _Inner()


def is_inner() -> bool:
    """Whether the backward pass that this thread runs is inside of another."""
    return bool(_inner.passes)


def after_inner(call: Callable[[], None]) -> None:
    """Call `call` when the inner pass of this thread has ended, and the pass around it is the one that runs."""
    _inner.passes[-1].append(call)


def watch_passes() -> None:
    """Patch torch's function for backward passes. A second call does nothing."""
    graph: Any = torch.autograd.graph
    really = graph._engine_run_backward
    if getattr(really, "_of_gradlane", False):
        return

    @functools.wraps(really)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if not inside_a_backward_pass():
            return really(*args, **kwargs)
        calls: list[Callable[[], None]] = []
        _inner.passes.append(calls)
        try:
            gradients = really(*args, **kwargs)
        finally:
            _inner.passes.pop()
        for call in calls:
            call()
        return gradients

    run_backward._of_gradlane = True  # type: ignore[attr-defined]
    place: Any = torch.autograd
    graph._engine_run_backward = place._engine_run_backward = run_backward  # torch takes the one for the other after a trace
