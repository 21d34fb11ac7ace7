"""Guarded parameters: one whose update is deferred cannot be read as if it were current.

Between `optimizer.step()` and a deferred update, the memory of a parameter holds a value that DDP would never show. So the
first use waits, whoever makes it: a layer, an EMA, `deepcopy`, a logger. A guarded parameter keeps its identity. Only its
`__class__` changes, to a subclass that sees every torch function applied to it, and changes back before that function runs.
What reads a parameter without any torch function (a compiled or scripted module) gets a forward pre-hook instead, see
`passes.py`.

A guard comes off last. The thread that makes an update turns torch's functions on subclasses off for itself
(`as_ordinary`); another thread that meets the guard meanwhile waits for it (`turn.py`).

This needs no map of which module uses which parameter, and it cannot miss a use inside a forward pass in Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.optim.optimizer as optimizers

from gradlane.live.comm.turn import turn
from gradlane.live.session.pending_gradient import GRADIENT, METADATA, PendingGradient, pending_in, with_real
from gradlane.live.session.tracked import Tracked

OnUse = Callable[[Tracked], None]
"""Makes the parameter current."""

get_gradient: Callable[[torch.Tensor], torch.Tensor | None] = GRADIENT.__get__
"""`.grad` of a parameter, for a thread that is `as_ordinary`; several times as fast as by its guard."""
set_gradient: Callable[[torch.Tensor, torch.Tensor | None], None] = GRADIENT.__set__

# by id(); the entry refers to the parameter, so that no other object gets its id
_watched: dict[int, tuple[torch.nn.Parameter, Tracked, OnUse]] = {}


as_ordinary = torch._C.DisableTorchFunctionSubclass
"""Within it, the calling thread uses watched parameters as if they were ordinary ones."""


def watch(several: Iterable[Tracked], touched: OnUse) -> None:
    """Call `touched(tracked)` before any operation that reads the parameter of one of `several`, until `unwatch`.

    `touched` makes the parameter current and then calls `unwatch`, or raises. Several threads may call it at once.
    """
    for tracked in several:
        param: Any = tracked.param
        own: Any = type(param)
        if not issubclass(own, _Pending):
            _watched[id(param)] = (param, tracked, touched)
            param.__class__ = _pending_class(own)


def is_watched(param: torch.nn.Parameter) -> bool:
    """Whether `param` is not current yet."""
    return id(param) in _watched


def unwatch(several: Iterable[Tracked]) -> None:
    """Give the parameters of `several`, which are current, their own classes back."""
    if not _watched:
        return
    for tracked in several:
        param: Any = tracked.param
        if id(param) in _watched:
            _give_class_back(param)  # before its entry goes: a thread that meets the guard looks for the entry
            del _watched[id(param)]


def _give_class_back(param: Any) -> None:
    param.__class__ = type(param).__mro__[2]  # [pending class, _Pending, own class, ...]


# in turn: another thread, which makes the update of `param`, has the sum in `.grad` meanwhile


def _get_gradient(param: Any) -> Any:
    with turn, as_ordinary():
        return GRADIENT.__get__(param)


def _set_gradient(param: Any, gradient: Any) -> None:
    with turn, as_ordinary():
        GRADIENT.__set__(param, gradient)


def _delete_gradient(param: Any) -> None:
    with turn, as_ordinary():
        GRADIENT.__delete__(param)


class _Pending:
    """Mixed into the class of a watched parameter."""

    # `zero_grad` gets and sets it; a quarter of what it costs by way of `__torch_function__`
    grad = property(_get_gradient, _set_gradient, _delete_gradient)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:  # a parameter that is frozen keeps the update that it is owed
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for value in args:
            if isinstance(value, _Pending):
                use(value)
            elif isinstance(value, _CONTAINERS):
                use_all_in(value)
        if kwargs:
            use_all_in(kwargs)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        use(self)
        own: Any = type(self)  # by now the parameter's own class
        return own.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        use(self)
        return type(self).__reduce_ex__(self, protocol)


def use(param: Any) -> None:
    """Make a watched `param` current, by calling what `watch` was given for it."""
    entry = _watched.get(id(param))
    if entry is not None:
        _, known_as, touched = entry
        touched(known_as)
    elif isinstance(param, _Pending):
        _give_class_back(param)  # a copy that another thread has made of a watched one


def current(value: Any) -> Any:
    """`value` for code that reads memory past every guard.

    Returns:
        `value`, whose parameters are current. A gradient that stands for a sum is replaced by the tensor that the script
        has in `.grad` from then on; lists, tuples and dictionaries that have any by others.
    """
    if isinstance(value, _Pending):
        use(value)
    elif isinstance(value, PendingGradient):
        return value.own()
    elif isinstance(value, _CONTAINERS):
        use_all_in(value)
        if next(pending_in(value), None) is not None:
            return with_real(value, PendingGradient.own)
    return value


_CONTAINERS = (list, tuple, set, dict)


def use_all_in(values: Any) -> None:
    """Make all watched parameters current that are in `values`, one of `_CONTAINERS`."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, _Pending):
            use(value)
        elif isinstance(value, _CONTAINERS):
            use_all_in(value)


@functools.cache
def _pending_class(own: type) -> Any:
    """Make the subclass of `own` that sees every torch function.

    It has the layout of `own`, so that `__class__` may be assigned, and the name, which a script may print.
    """
    pending = type(own)(own.__name__, (_Pending, own), {"__module__": own.__module__})
    if own in optimizers._foreach_supported_types:  # an optimizer takes the same kernels for it
        optimizers._foreach_supported_types.append(pending)  # type: ignore[arg-type]
    return pending
