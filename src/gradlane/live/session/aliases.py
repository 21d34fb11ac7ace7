"""Aliases: whether anything else refers to a tensor's memory and could use it past every guard.

A parameter whose update is deferred is guarded as an object, and the optimizer's state as an
attribute. A view, a tensor from `.data` or `state_dict()`, a NumPy array or a reference to a
momentum buffer gives access to the same memory, and no guard sees it. Counting references finds
that such an alias exists, whoever holds it.

The argument of `sys.getrefcount` is a reference, too, but from Python 3.14 on not one that is read from a local variable.
So the argument is an expression, or what is counted and what it is compared with go through one function.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from weakref import getweakrefcount

import torch

from gradlane.live.session.guarded_states import attributes_of
from gradlane.live.session.tracked import Tracked

_IMMUTABLE = frozenset((int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size))


def _holders(tensor: Any) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _most_references(values: dict[Any, Any]) -> int:
    most = 0
    for value in values.values():
        if type(value) in _IMMUTABLE:  # a count of steps, say; Python has one object for all who hold a small number
            continue
        references = sys.getrefcount(value)
        if references > most:
            most = references
    return most


def _references_of_gradient(param: torch.Tensor) -> int:
    return sys.getrefcount(param.grad)


def _references_of_a_gradient_alone() -> tuple[int, int]:
    """In Python, and in C++."""
    param: Any = torch.empty(1, device="cpu")
    param.grad = torch.empty(1, device="cpu")
    return _references_of_gradient(param), param.grad._use_count()


# references in C++: by the Python object, and by the node that accumulates its gradient
_PARAMETER_AND_ITS_NODE = 2


def accumulator_of(param: torch.nn.Parameter) -> Any:
    """Autograd's node that accumulates the gradient of `param`.

    The node refers to `param`, and autograd drops it when nobody else needs it. Whoever counts
    references to `param` must therefore keep the node, so that its reference is always among them.
    """
    with torch.enable_grad():
        node = param.view_as(param).grad_fn
    assert node is not None
    return node.next_functions[0][0]


# the same counts for an object that nothing else refers to
_ONE_HOLDER = _holders(torch.empty(1, device="cpu"))
_ONE_REFERENCE = _most_references({0: object()})
_OF_ONE_ENTRY: dict[int, Any] = {0: {}}
_ONE_ENTRY = sys.getrefcount(_OF_ONE_ENTRY[0])
_ONE_GRADIENT, _ONE_GRADIENT_IN_CPP = _references_of_a_gradient_alone()
_ORDINARY = (torch.Tensor, torch.nn.Parameter)
_NO_FUNCTION = torch.nn.Parameter.__torch_function__
_PROBE = Tracked("", torch.nn.Parameter(torch.empty(0, device="cpu")), 0)
_PROBE.wrapper = object()  # type: ignore[assignment]
_ONE_WRAPPER = sys.getrefcount(_PROBE.wrapper)


def is_the_scripts(param: torch.nn.Parameter) -> bool:
    """Whether the script refers to the gradient of `param` or to its memory (a view, an array, the gradient of another
    parameter), or an array may own that.
    """
    if _references_of_gradient(param) > _ONE_GRADIENT or _holders(param.grad) > _ONE_HOLDER:
        return True
    gradient: Any = param.grad
    if gradient is None:
        return False
    return is_shared(gradient) or not gradient.untyped_storage().resizable()  # not torch's own memory


def is_shared(gradient: Any) -> bool:
    """Whether something else in C++ refers to a gradient that stands in a `.grad`, as another parameter does."""
    return int(gradient._use_count()) > _ONE_GRADIENT_IN_CPP


def is_held(tracked: Tracked) -> bool:
    """Whether anything but `tracked` refers to what stands for the sum of its gradient, in Python or C++, or has marked it: by
    an attribute, as a key of weak references, or with `requires_grad_()`. The next gradient is another object under DDP.
    """
    if sys.getrefcount(tracked.wrapper) > _ONE_WRAPPER:
        return True
    wrapper: Any = tracked.wrapper
    return wrapper.is_marked or getweakrefcount(wrapper) > 0


class Aliases:
    """Looks for aliases of parameters and optimizer state. Made for one `optimizer.step()`.

    Args:
        optimizer: the one that steps.
        tracked: all parameters that the session trains. Each has its `accumulator_of`, so that the number of
            references to a parameter is the same at every step. One that is out of date is replaced here.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, tracked: Sequence[Tracked]) -> None:
        self._tracked = tracked
        attributes = attributes_of(optimizer)
        self._state_is_held = sys.getrefcount(attributes["state"]) > _ONE_ENTRY  # by more than the optimizer
        self._state = attributes["state"]  # which may be watched: nothing of it is read here
        self._by_storage: dict[int, int] | None = None

    def of(self, tracked: Tracked) -> bool:
        """Whether anything else refers to the memory of a parameter or of its optimizer state, or may. That is another
        process, or a class of the script's with torch functions of its own, which a deferred update turns off.
        """
        param = tracked.param
        if type(param).__torch_function__ is not _NO_FUNCTION:
            return True
        if param._use_count() > _PARAMETER_AND_ITS_NODE:  # type: ignore[attr-defined]
            if not param.requires_grad:
                return True  # it is frozen, and autograd makes no node to count with
            # after a change of dtype the parameter has another node
            tracked.accumulator = accumulator_of(param)
            if param._use_count() > _PARAMETER_AND_ITS_NODE:  # type: ignore[attr-defined]
                return True  # a ScriptModule or an extension refers to it
        storage = param.untyped_storage()
        if param.is_cpu and storage.is_shared():
            return True  # another process may read it
        holders = int(torch._C._storage_Use_Count(storage._cdata)) - _ONE_HOLDER
        if holders and holders >= self._apart(param):
            return True
        if self._state_is_held:
            return True
        references = sys.getrefcount(self._state.get(param))
        values = self._state.get(param)
        if values is None:
            return False
        if references > _ONE_ENTRY or _most_references(values) > _ONE_REFERENCE:
            return True
        for value in values.values():
            if isinstance(value, torch.Tensor) and (
                type(value) not in _ORDINARY or _holders(value) > _ONE_HOLDER or getweakrefcount(value)
            ):
                return True
        return False

    def _apart(self, param: torch.nn.Parameter) -> int:
        """How many parameters share the storage of `param`, as in a flattened RNN layer; 0 if some of them overlap."""
        if self._by_storage is None:
            ranges = defaultdict(list)
            for tracked in self._tracked:
                ranges[tracked.param.untyped_storage()._cdata].append(_range_of(tracked.param))
            self._by_storage = {storage: 0 if _overlap(several) else len(several) for storage, several in ranges.items()}
        return self._by_storage[param.untyped_storage()._cdata]


def _overlap(ranges: Sequence[tuple[int, int]]) -> bool:
    return any(after < end for (_, end), (after, _) in pairwise(sorted(ranges)))


def _range_of(param: torch.nn.Parameter) -> tuple[int, int]:
    """Which bytes of its storage `param` is in."""
    first, size = int(param.storage_offset()), param.element_size()
    spans = [(length - 1) * stride for length, stride in zip(param.shape, param.stride(), strict=True)]
    return first * size, (first + int(sum(spans)) + 1 if param.numel() else first) * size
