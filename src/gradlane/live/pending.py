"""Pending gradients and parameters: a value that is not there yet cannot be read as if it were.

Between a gradient's readiness and its sum, and between `optimizer.step()` and a deferred update, the memory
of a gradient or a parameter holds something that plain DDP would never show. Both are guarded, so that the
first use waits, whoever makes it (a layer, `clip_grad_norm_`, GradScaler, an EMA, `deepcopy`, a logger):

- `PendingGradient` is a tensor subclass that stands in `param.grad`. Every operation on it, from Python or
  from C++ (autograd's accumulation included), comes here, waits for the sum, and runs on the real gradient.
- A pending parameter keeps its identity: only its `__class__` changes, to a subclass that sees every torch
  function applied to it, and changes back before that function runs. What reads a parameter without any
  torch function (a compiled or scripted module) gets a forward pre-hook instead, see `session.py`.

This needs no map of which module uses which parameter, and it cannot miss a use inside a Python forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

Resolve = Callable[[int], None]
"""Makes tensor `index` current: waits for its sum and, if one is due, runs its update."""


class PendingGradient(torch.Tensor):
    """Stands in `param.grad` for `slot`, where its sum will be, until `resolve(index)` has returned."""

    slot: torch.Tensor
    _index: int
    _resolve: Resolve

    @staticmethod
    def __new__(cls, slot: torch.Tensor, index: int, resolve: Resolve) -> PendingGradient:
        wrapper: PendingGradient = torch.Tensor._make_wrapper_subclass(
            cls, slot.shape, strides=slot.stride(), dtype=slot.dtype, device=slot.device
        )
        return wrapper

    def __init__(self, slot: torch.Tensor, index: int, resolve: Resolve) -> None:
        self.slot = slot
        self._index = index
        self._resolve = resolve

    def current(self) -> torch.Tensor:
        """The real gradient, once it is the sum."""
        self._resolve(self._index)
        return self.slot

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*_current(args), **_current(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it otherwise than it calls it
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*_current(args), **_current(kwargs or {}))


def _current(value: Any) -> Any:
    if isinstance(value, PendingGradient):
        return value.current()
    if type(value) in (list, tuple):
        return type(value)(_current(item) for item in value)
    if type(value) is dict:
        return {key: _current(item) for key, item in value.items()}
    return value


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


_gradient_attribute: Any = torch.Tensor.grad

# what tells nothing of the values, and so need not wait
_METADATA = {
    *(_getter(name) for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_sparse", "is_leaf", "grad_fn")),
    *(_getter(name) for name in ("grad", "is_cuda", "is_cpu", "ndim", "is_quantized", "is_meta", "is_sparse_csr")),
    _gradient_attribute.__set__,
    _gradient_attribute.__delete__,
    torch.Tensor.size,
    torch.Tensor.stride,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.element_size,
    torch.Tensor.requires_grad_,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.is_floating_point,
    torch.is_complex,
}


# -- parameters ------------------------------------------------------------------------------------------

_watched: dict[int, tuple[torch.nn.Parameter, int, Resolve]] = {}  # by id(); the entry keeps the id alive
_classes: dict[type, type] = {}  # a parameter's own class -> its pending subclass


def watch(param: torch.nn.Parameter, index: int, touched: Resolve) -> None:
    """Call `touched(index)` before the next operation that reads `param`, once."""
    own = type(param)
    if not issubclass(own, _Pending):
        _watched[id(param)] = (param, index, touched)
        param.__class__ = _classes.get(own) or _pending_class(own)


def unwatch(param: torch.nn.Parameter) -> None:
    """Give `param` its own class back."""
    if _watched.pop(id(param), None) is not None:
        param.__class__ = type(param).__mro__[2]  # [pending class, _Pending, own class, ...]


def is_watched(param: torch.nn.Parameter) -> bool:
    return id(param) in _watched


class _Pending:
    """Mixed into the class of a watched parameter."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for param in _parameters_in((args, kwargs)):
            _touch(param)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _touch(self)
        own: Any = type(self)  # by now the parameter's own class
        return own.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _touch(self)
        return type(self).__reduce_ex__(self, protocol)


def _touch(param: Any) -> None:
    entry = _watched.get(id(param))
    if entry is not None:
        _, index, touched = entry
        unwatch(param)  # first, so that the update itself sees a plain parameter
        touched(index)


def _parameters_in(value: Any) -> Iterator[_Pending]:
    if isinstance(value, _Pending):
        yield value
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _parameters_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _parameters_in(item)


def _pending_class(own: type) -> type:
    """A subclass of `own` that sees every torch function; same layout, so `__class__` may be assigned."""
    pending = type(own)(f"Pending{own.__name__}", (_Pending, own), {"__module__": __name__})
    _classes[own] = pending
    return pending
