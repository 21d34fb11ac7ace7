"""Guarded states: the state of an optimizer that has deferred updates is not read, cleared, loaded or copied before they ran.

As with a guarded parameter, only the optimizer's `__class__` changes, to a subclass whose attributes make the updates first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

# by id(); the entry refers to the optimizer, so that no other object gets its id. Several sessions may share an optimizer:
# the dictionary has each owner of deferred updates, by its id(), and what runs them
_owing: dict[int, tuple[torch.optim.Optimizer, dict[int, tuple[object, Callable[[], None]]]]] = {}
_own_classes: dict[type, type] = {}  # an optimizer's pending class -> its own


def watch(optimizer: torch.optim.Optimizer, owner: object, settle: Callable[[], None]) -> None:
    """Call `settle()` before anything accesses `optimizer.state`, until `unwatch`.

    Args:
        optimizer: whose state is not up to date.
        owner: has deferred updates of `optimizer`, beside others that may have some too.
        settle: runs the owner's deferred updates. Several threads may call it at once.
    """
    own: Any = type(optimizer)
    _owing.setdefault(id(optimizer), (optimizer, {}))[1][id(owner)] = (owner, settle)
    if own not in _own_classes:
        optimizer.__class__ = _pending_optimizer_class(own)


@functools.cache
def _pending_optimizer_class(own: Any) -> Any:
    pending = derived(own, __getattribute__=_get_attribute, __setattr__=_set_attribute)
    _own_classes[pending] = own
    return pending


def derived(own: Any, **methods: Any) -> Any:
    """A subclass of an optimizer's class, for its `__class__`.

    It has the same name, which torch's profiler and LR schedulers' messages show. It has no other base: Python refuses
    `__class__` another layout, which it may have where `own` has several bases.
    """
    return type(own)(own.__name__, (own,), {"__module__": own.__module__, **methods})


def unwatch(optimizer: torch.optim.Optimizer, owner: object) -> None:
    """Note that `owner` has no deferred updates of `optimizer`, which has its own class once no owner has any."""
    entry = _owing.get(id(optimizer))
    if entry is not None and entry[1].pop(id(owner), None) is not None and not entry[1]:
        unwatch_for_all(optimizer)


def unwatch_for_all(optimizer: torch.optim.Optimizer) -> None:
    """Give `optimizer` its own class back, although sessions have deferred updates of it."""
    if _owing.pop(id(optimizer), None) is not None:
        optimizer.__class__ = own_class(optimizer)


def own_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The class that the script made `optimizer` of, also while its state is watched."""
    found = type(optimizer)
    return _own_classes.get(found, found)


# these show, replace or copy the state; everything else of an optimizer (groups, learning rates,
# defaults) is already as it is after step()
GETS_AT_STATE = frozenset(("state", "__dict__", "__setstate__", "__getstate__", "__reduce_ex__", "__deepcopy__"))


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of `optimizer`, whose state may not be up to date."""
    found: dict[str, Any] = object.__getattribute__(optimizer, "__dict__")
    return found


def _get_attribute(optimizer: Any, name: str) -> Any:
    if name in GETS_AT_STATE and id(optimizer) in _owing:
        _settle(optimizer)
        return getattr(optimizer, name)  # by now the optimizer has its own class again
    return own_class(optimizer).__getattribute__(optimizer, name)


def _set_attribute(optimizer: Any, name: str, value: Any) -> None:
    if name in GETS_AT_STATE:
        _settle(optimizer)
    own_class(optimizer).__setattr__(optimizer, name, value)


def _settle(optimizer: Any) -> None:
    entry = _owing.get(id(optimizer))
    if entry is None:
        return
    for owner, settle in list(entry[1].values()):
        settle()
        unwatch(optimizer, owner)
