"""Closures of `optimizer.step(closure)`: run before the step where the optimizer would run them first.

Trainers pass a closure with the whole forward and backward pass to every step. Run first, it leaves
a step like any other, whose updates can be deferred.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradlane.live.session.deferred_step import PER_PARAMETER
from gradlane.live.session.guarded_states import own_class
from gradlane.live.session.hooks import is_last


def closure_of(args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """The closure that `step` was called with; None if there is none.

    Args:
        args: of the call, beginning with the optimizer.
        kwargs: of the call.
    """
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure


def run_first(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Run the closure of this call of `step` now, if `optimizer` would run it once, before all else.

    Every optimizer of `PER_PARAMETER` does. One that is not known may run it several times, as LBFGS
    does; its closure is left to it.

    Args:
        optimizer: whose step it is.
        args, kwargs: of the call, as for `closure_of`.

    Returns:
        What to call `step` with instead: a closure that returns the loss which has been computed.
        None if nothing was run.
    """
    closure = closure_of(args, kwargs)
    # a pre-hook that comes after this one has to see what there is before the closure
    if closure is None or own_class(optimizer) not in PER_PARAMETER or not is_last(optimizer):
        return None
    with torch.enable_grad():  # as `step` does
        loss = closure()
    return (args[0],), {**kwargs, "closure": lambda: loss}
