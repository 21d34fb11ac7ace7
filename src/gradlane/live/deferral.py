"""Deferred updates: the user's own optimizer, stepped for a few parameters at a time, later.

A shallow copy of the optimizer whose groups hold only some parameters, and which shares the state of the
original, updates those bit for bit as the whole would, provided that each update depends on nothing but its
parameter's own gradient and state. The hyper-parameters are those of the moment of `step()`, since an LR
scheduler changes them before a deferred update runs.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

# Each updates a parameter from its own gradient and state alone. LBFGS and whatever takes a norm over all
# parameters does not; an optimizer that is not here waits for all gradients.
PER_PARAMETER: frozenset[type] = frozenset(
    getattr(torch.optim, name)
    for name in (
        "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
        "Adafactor", "Muon",
    )
    if hasattr(torch.optim, name)
)  # fmt: skip


def why_it_needs_the_barrier(optimizer: torch.optim.Optimizer) -> str | None:
    """None if updates of `optimizer` may be deferred, else the reason why not."""
    if type(optimizer) in PER_PARAMETER:
        return None
    return (
        f"{type(optimizer).__name__} is not known to update each parameter from its own gradient alone; pass "
        "cross_barrier=True to gradlane.attach if it does"
    )


class DeferredStep:
    """What one call of `optimizer.step()` still owes: parameters, and hyper-parameters as they were then."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [
            {key: _snapshot(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self._group_of = {id(param): index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}

    def update(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Step `params`, whose `.grad` must be in place, under the hyper-parameters of the call."""
        members: dict[int, list[torch.nn.Parameter]] = {}
        for param in params:
            members.setdefault(self._group_of[id(param)], []).append(param)
        part = object.__new__(type(self._optimizer))
        part.__dict__ = dict(self._optimizer.__dict__)
        part.__dict__.pop("step", None)  # an LR scheduler's counting wrapper
        part.param_groups = [{**self._groups[index], "params": params} for index, params in sorted(members.items())]
        part._optimizer_step_pre_hooks = OrderedDict()
        part._optimizer_step_post_hooks = OrderedDict()
        # past the wrapper that records the call and runs hooks: they ran at step()
        step: Any = type(part).step
        device = next(iter(members.values()))[0].device.type
        # a deferred update runs wherever its parameter is first used: autocast and inference_mode there must not reach it
        with torch.inference_mode(False), torch.autocast(device, enabled=False):
            getattr(step, "__wrapped__", step)(part)


def _snapshot(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()  # a tensor learning rate is changed in place
    return copy.copy(value) if isinstance(value, (list, dict)) else value
