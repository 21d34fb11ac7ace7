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
from gradlane.live.session.guards import GETS_AT_STATE, METADATA
from gradlane.live.session.hooks import tensors_in

ADVICE = "Other parameters may have theirs, so load a checkpoint before anything reads them"
_OVERWRITES = {torch.Tensor.copy_, torch.Tensor.data.__set__}  # type: ignore[attr-defined]
_REASON = "_gradlane_outdated"  # the attribute that says what happened


def refuse_reads(param: torch.nn.Parameter, reason: str) -> None:
    """Have every operation that reads `param` raise a `JobError` with `reason`, until it is overwritten."""
    own = type(param)
    if not issubclass(own, _Outdated):
        param.__class__ = _subclass(_Outdated, own, f"Outdated{own.__name__}")
        setattr(param, _REASON, reason)


def refuse_state(optimizer: torch.optim.Optimizer, reason: str) -> None:
    """Have whatever reads the state of `optimizer` raise a `JobError` with `reason`, until another is loaded."""
    own: Any = type(optimizer)
    if not issubclass(own, _OutdatedOptimizer):
        optimizer.__class__ = _subclass(_OutdatedOptimizer, own, own.__name__)
        object.__setattr__(optimizer, _REASON, reason)


def check(tensor: torch.Tensor) -> None:
    """Raise a `JobError` if `tensor` is a parameter whose reads are refused."""
    if isinstance(tensor, _Outdated):
        _refuse(tensor)


def _refuse(what: Any) -> None:
    raise JobError(object.__getattribute__(what, _REASON))


def _allow(what: Any) -> None:
    """Give `what` its own class back."""
    object.__delattr__(what, _REASON)
    what.__class__ = type(what).__mro__[2]  # [outdated class, mixin, own class, ...]


@functools.cache
def _subclass(mixin: type, own: Any, name: str) -> Any:
    return type(own)(name, (mixin, own), {"__module__": own.__module__})


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


class _OutdatedOptimizer:
    """Mixed into the class of an optimizer."""

    def __getattribute__(self, name: str) -> Any:
        if name not in GETS_AT_STATE:
            return super().__getattribute__(name)
        if name != "__setstate__":
            _refuse(self)
        _allow(self)
        return getattr(self, name)  # by now the optimizer has its own class again

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "state":
            _allow(self)
        object.__setattr__(self, name, value)  # torch's optimizers define no __setattr__
