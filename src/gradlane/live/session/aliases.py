"""Aliases: whether anybody else holds the memory of a tensor, who could read or write it past every guard.

A parameter whose update is deferred is guarded as an object, and the optimizer's state as an attribute. A view, a tensor
from `.data` or `state_dict()`, a NumPy array or a reference to a momentum buffer is another way to the same memory, on
which no guard can sit. Counting references finds that such a way exists, whoever has it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch


def _holders(tensor: Any) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _references(values: dict[Any, Any]) -> list[int]:
    return [sys.getrefcount(value) for value in values.values()]


def _references_of_gradient(param: torch.Tensor) -> int:
    return sys.getrefcount(param.grad)


def _references_of_a_gradient_alone() -> int:
    param = torch.empty(1)
    param.grad = torch.empty(1)
    return _references_of_gradient(param)


_PARAMETER_AND_ITS_NODE = 2  # references in C++: of the Python object, and of the node that accumulates its gradient


def accumulator_of(param: torch.nn.Parameter) -> Any:
    """Autograd's node that accumulates the gradient of `param`. Whoever counts references to it must keep this."""
    with torch.enable_grad():
        node = param.view_as(param).grad_fn
    assert node is not None
    return node.next_functions[0][0]


# what the same questions answer about something that nobody else holds
_ONE_HOLDER = _holders(torch.empty(1))
_ONE_REFERENCE = _references({0: object()})[0]
_ONE_GRADIENT = _references_of_a_gradient_alone()
_PROBE = [object()]
_ONE_IN_A_LIST = sys.getrefcount(_PROBE[0])


def is_the_scripts(param: torch.nn.Parameter) -> bool:
    """Whether anybody but `param` holds its gradient, as an object or as memory (a view, an array)."""
    return _references_of_gradient(param) > _ONE_GRADIENT or _holders(param.grad) > _ONE_HOLDER


def is_held(tensors: Sequence[torch.Tensor], index: int) -> bool:
    """Whether anybody but the list has a reference to the tensor object `tensors[index]`; what has one in C++ counts too."""
    return sys.getrefcount(tensors[index]) > _ONE_IN_A_LIST


class Aliases:
    """Made for one `optimizer.step()`.

    params: all that a session trains. accumulators: the `accumulator_of` each by its id(), kept by the session so that the
    references to a parameter are the same in number at every step.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, params: Iterable[torch.nn.Parameter], accumulators: dict[int, Any]
    ) -> None:
        self._params, self._accumulators = params, accumulators
        self._state = optimizer.state
        # the attribute, this object and the call
        self._state_is_held = sys.getrefcount(self._state) > _ONE_REFERENCE
        self._by_storage: Counter[int] | None = None

    def of(self, param: torch.nn.Parameter) -> bool:
        """Whether the memory of `param`, or of the optimizer's state of it, is held by anybody else."""
        if param._use_count() > _PARAMETER_AND_ITS_NODE:  # type: ignore[attr-defined]
            self._accumulators[id(param)] = accumulator_of(param)  # another one after a change of dtype
            if param._use_count() > _PARAMETER_AND_ITS_NODE:  # type: ignore[attr-defined]
                return True  # a ScriptModule, an extension
        holders = _holders(param) - _ONE_HOLDER
        if holders and holders >= self._sharing(param):
            return True
        if self._state_is_held:
            return True
        entry = {0: self._state[param]} if param in self._state else {}
        if not entry:
            return False
        if _references(entry)[0] > _ONE_REFERENCE + 1:  # the state itself holds it too
            return True
        values = entry[0]
        if any(references > _ONE_REFERENCE for references in _references(values)):
            return True
        return any(isinstance(value, torch.Tensor) and _holders(value) > _ONE_HOLDER for value in values.values())

    def _sharing(self, param: torch.nn.Parameter) -> int:
        """How many of the parameters lie in the storage of `param`: a flattened recurrent layer has them all in one."""
        if self._by_storage is None:
            self._by_storage = Counter(other.untyped_storage()._cdata for other in self._params)
        return self._by_storage[param.untyped_storage()._cdata]
