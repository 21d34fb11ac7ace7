"""Outdated: parameters without their last update, which a failed job will not make any more.

If a job fails while updates are deferred, some parameters and some of the optimizer's state are of
the last step and others of the step before. A checkpoint of them would mix two steps in silence. So
whatever reads one that lacks its update raises, also once the session is closed, until it is
overwritten as a whole, as by `load_state_dict`. Only functorch is not seen, if it is given such a
parameter itself (`torch.func.grad(loss)(layer.weight)`).

Nothing here refers to a parameter: what is known of it lies on the object itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from gradlane.errors import JobError
from gradlane.live.session.guarded_states import GETS_AT_STATE, derived
from gradlane.live.session.hooks import tensors_in
from gradlane.live.session.pending_gradient import METADATA

ADVICE = "Other parameters may have theirs, so load a checkpoint before anything reads them"
_OVERWRITES = {torch.Tensor.copy_, torch.Tensor.data.__set__}  # type: ignore[attr-defined]
_REASON = "_gradlane_outdated"  # the attribute that says what happened


def refuse_reads(param: torch.nn.Parameter, reason: str) -> None:
    """Have every operation that reads `param` raise a `JobError` with `reason`, until it is overwritten."""
    own = type(param)
    if not issubclass(own, _Outdated):
        param.__class__ = _outdated_parameter_class(own)
        setattr(param, _REASON, reason)


def refuse_state(optimizer: torch.optim.Optimizer, reason: str) -> None:
    """Have whatever reads the state of `optimizer` raise a `JobError` with `reason`, until another is loaded."""
    own: Any = type(optimizer)
    if own not in _own_classes:
        optimizer.__class__ = _outdated_class(own)
        object.__setattr__(optimizer, _REASON, reason)


def check(tensor: torch.Tensor) -> None:
    """Raise a `JobError` if `tensor` is a parameter whose reads are refused."""
    if isinstance(tensor, _Outdated):
        _refuse(tensor)


def check_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise a `JobError` if `optimizer` is one whose state is refused."""
    if type(optimizer) in _own_classes:
        _refuse(optimizer)


def _refuse(what: Any) -> None:
    raise JobError(object.__getattribute__(what, _REASON))


def _allow(what: Any) -> None:
    """Give `what` its own class back."""
    object.__delattr__(what, _REASON)
    found = type(what)
    what.__class__ = _own_classes[found] if found in _own_classes else found.__mro__[2]  # [outdated, _Outdated, own, ...]


@functools.cache
def _outdated_parameter_class(own: Any) -> Any:
    return type(own)(f"Outdated{own.__name__}", (_Outdated, own), {"__module__": own.__module__})


class _Outdated:
    """Mixed into the class of a parameter."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in METADATA:
            overwritten = args[:1] if func in _OVERWRITES else ()
            for tensor in tensors_in((args[len(overwritten) :], kwargs)):
                check(tensor)
            for tensor in overwritten:
                if isinstance(tensor, _Outdated):
                    _allow(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _refuse(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse(self)


# -- optimizers ------------------------------------------------------------------------------------

_own_classes: dict[type, Any] = {}  # by the class whose state is refused


@functools.cache
def _outdated_class(own: Any) -> Any:
    outdated = derived(own, __getattribute__=_get_attribute, __setattr__=_set_attribute)
    _own_classes[outdated] = own
    return outdated


def _get_attribute(optimizer: Any, name: str) -> Any:
    if name not in GETS_AT_STATE:
        return _own_classes[type(optimizer)].__getattribute__(optimizer, name)
    if name != "__setstate__":
        _refuse(optimizer)
    _allow(optimizer)
    return getattr(optimizer, name)  # by now the optimizer has its own class again


def _set_attribute(optimizer: Any, name: str, value: Any) -> None:
    own = _own_classes[type(optimizer)]
    if name == "state":
        _allow(optimizer)
    own.__setattr__(optimizer, name, value)
