"""OwnAttributes: what a script's own optimizer keeps beside its parameters and their state, as it was at one time.

A deferred update runs the optimizer's `step()` on another object. That has to begin with what the optimizer had when the script
called `step()`, and must not change it: the script's call has changed it already.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from gradlane.live.session.bits import same_bits
from gradlane.live.session.guarded_states import attributes_of, own_class

_SAME = (torch.nn.Module, torch.optim.Optimizer, type, FunctionType, BuiltinFunctionType, ModuleType)
_OWNER = "owner"


def slot_of(optimizer: torch.optim.Optimizer) -> str | None:
    """The name of a slot of the optimizer's class, which `OwnAttributes` does not have; None if there is none."""
    for base in own_class(optimizer).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                return str(name)
    return None


class OwnAttributes:
    """The attributes of an optimizer as they are now.

    Whatever a step may change is copied, in whatever object it is. Parameters, the optimizer's state, modules and functions are
    the same in each copy. So is an attribute that cannot be pickled, such as a lock, or an object that has one.

    Args:
        optimizer: that the script has made.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        attributes = dict(attributes_of(optimizer))
        self._shared = {key: attributes.pop(key) for key in list(attributes) if _is_torchs(key)}
        same = {id(each): each for each in _parts_of(optimizer)}
        try:
            self._taken = _Taken(attributes, optimizer, same)
        except Exception:  # of any kind: the script's own classes say how they are pickled
            self._shared |= {key: attributes.pop(key) for key in list(attributes) if not _can_be_taken(key, optimizer, same)}
            self._taken = _Taken(attributes, optimizer, same)

    def copy_for(self, owner: Any) -> dict[str, Any]:
        """The attributes for another object.

        Args:
            owner: what the copies refer to in place of the optimizer.
        """
        return {**self._shared, **self._taken.given_to(owner)}


def _is_torchs(key: str) -> bool:
    """Whether torch gives optimizers this attribute, and no step changes it. `step` is there under an LR scheduler."""
    return key in ("state", "param_groups", "step") or key.startswith("_optimizer_")


def _parts_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Parameters, groups and state, with all containers and tensors of the state."""
    attributes = attributes_of(optimizer)
    state = attributes["state"]
    parts = [attributes["param_groups"], *optimizer.param_groups, state]
    parts += [param for group in optimizer.param_groups for param in group["params"]]
    for of_param in state.values():
        parts.append(of_param)
        parts += [value for value in of_param.values() if isinstance(value, torch.Tensor)] if isinstance(of_param, dict) else []
    return parts


def _can_be_taken(key: str, optimizer: torch.optim.Optimizer, same: dict[int, Any]) -> bool:
    try:
        _Taken({key: attributes_of(optimizer)[key]}, optimizer, same)
    except Exception:
        return False
    return True


class _Taken:
    """Attributes as bytes, beside the objects that are not in them."""

    def __init__(self, attributes: dict[str, Any], optimizer: torch.optim.Optimizer, same: dict[int, Any]) -> None:
        into = io.BytesIO()
        pickler = _Pickler(into, optimizer, same)
        pickler.dump(attributes)
        self._bytes, self._beside = into.getvalue(), pickler.beside

    def given_to(self, owner: Any) -> dict[str, Any]:
        found: dict[str, Any] = _Unpickler(io.BytesIO(self._bytes), self._beside, owner).load()
        return found


class _Pickler(pickle.Pickler):
    """Writes a place in `beside` for a tensor, of which it keeps a copy there, and for an object that all copies share."""

    def __init__(self, into: io.BytesIO, optimizer: torch.optim.Optimizer, same: dict[int, Any]) -> None:
        super().__init__(into, pickle.HIGHEST_PROTOCOL)
        self._optimizer, self._same = optimizer, same
        self._places: dict[int, int] = {}
        self.beside: list[tuple[Any, bool]] = []  # and whether each is copied for each owner

    def persistent_id(self, value: Any) -> Any:
        if value is self._optimizer:
            return _OWNER
        is_same = id(value) in self._same or isinstance(value, _SAME)
        if not is_same and not isinstance(value, torch.Tensor):
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self.beside)
            self.beside.append((value if is_same else value.detach().clone(), not is_same))
        return self._places[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, beside: list[tuple[Any, bool]], owner: Any) -> None:
        super().__init__(source)
        self._beside, self._owner = beside, owner
        self._copies: dict[int, Any] = {}

    def persistent_load(self, place: Any) -> Any:
        if place == _OWNER:
            return self._owner
        value, is_copied = self._beside[place]
        if not is_copied:
            return value
        if place not in self._copies:
            self._copies[place] = value.clone()
        return self._copies[place]


def differ(one: Any, other: Any, seen: set[tuple[int, int]] | None = None) -> bool:
    """Whether two values differ: numbers, tensors, and containers and objects of them. Anything else counts as equal.

    Args:
        seen: pairs, by id, that count as equal: they are compared already, or stand for one another.
    """
    if one is other:
        return False
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return not same_bits(one, other)
    if isinstance(one, (int, float)):
        return type(one) is not type(other) or (one != other and (one == one or other == other))
    seen, both = set() if seen is None else seen, (id(one), id(other))
    if type(one) is not type(other) or both in seen:
        return False
    seen.add(both)
    if isinstance(one, (list, tuple, deque)):
        return len(one) != len(other) or any(differ(a, b, seen) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() != other.keys() or any(differ(one[key], other[key], seen) for key in one)
    return differ(getattr(one, "__dict__", None), getattr(other, "__dict__", None), seen)
