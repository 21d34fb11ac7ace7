"""Finds the optimizers of wrapped models, by the steps that they make."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Stepped(Protocol):
    """Whoever is to hear of optimizers that step."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` steps, for the first time since `tell_of_steps`."""
        ...


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_told: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # optimizers that all listeners know
_hook: Any = None  # of torch; there from the first listener on


def tell_of_steps(listener: Stepped) -> None:
    """Call `listener.stepped` with each optimizer of this process when it next steps, and only then.

    It is held by a weak reference.
    """
    global _hook
    _listeners.add(listener)
    _told.clear()
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _told:
        return
    _told.add(optimizer)
    for listener in list(_listeners):
        listener.stepped(optimizer)
