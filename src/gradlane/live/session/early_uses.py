"""Early uses: what a script may do with a gradient whose sum has not arrived, without a wait for the sum.

There are two. Its norm may be known sooner than the sum (`Norms`). A change in place that takes numbers alone gives nothing
back but the gradient itself, so that it may run when the sum is there. It may be a multiplication (the factor of
`clip_grad_norm_`), a limit (`clip_grad_value_`), or numbers in place of NaN and infinity.

`GradScaler.unscale_` is both: it multiplies gradients, and tells whether they are finite, as they are if their norms are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from gradlane.live.session.tracked import Tracked

if TYPE_CHECKING:
    from gradlane.live.session.pending_gradient import Reads

Result = tuple[Any]
IsPending = Callable[[Any], bool]
"""Whether a value is a gradient that stood for a sum when it was made."""


def use_early(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_pending: IsPending) -> Result | None:
    """Do `func`, a function of torch, on gradients whose sums have not arrived.

    Returns:
        Its result in a tuple; None where it has to wait for sums.
    """
    early = _EARLY.get(func)
    if early is None or not args:
        return None
    gradients = args[0] if func in _OF_MANY else args[:1]
    if not all(is_pending(gradient) and gradient.reads is not None for gradient in gradients):
        return None
    return early(func, gradients, args, kwargs)


def wait_for_sums(gradients: Iterable[Any], order: float | None = None) -> None:
    """Wait for the sums of gradients that are about to be used; `order` as for `pending_gradient.Reads.read`."""
    for reads, several in _by_reads(gradients):
        reads.read(several, order)


def _by_reads(gradients: Iterable[Any]) -> Iterable[tuple[Reads, list[Tracked]]]:
    """Whose gradients stand for sums, by who has to hear of a use: each session of its own."""
    found: dict[int, tuple[Reads, list[Tracked]]] = {}
    for gradient in gradients:
        reads = gradient.reads
        if reads is not None:
            found.setdefault(id(reads), (reads, []))[1].append(gradient.tracked)
    return found.values()


def order_of_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The order of the norm of whole gradients that the call computes; None if it computes another thing, or on a device with
    another kernel than owners do (`both_norms`), whose norm may have other bits.
    """
    names = _NORMS.get(func)
    if names is None or not 0 < len(args) <= len(names) + 1:
        return None
    if func not in _OF_MANY and args[0].device.type != "cpu":
        return None
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    order = given.pop("ord", given.pop("p", 2.0))
    if any(value is not None and value is not False for value in given.values()):  # dim, keepdim, dtype or out
        return None
    if isinstance(order, str):
        order = {"fro": 2.0, "inf": math.inf}.get(order)
    return float(order) if isinstance(order, (int, float)) else None


def _norms(func: Any, gradients: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result | None:
    order = order_of_norm(func, args, kwargs)
    if order is None:
        return None
    known: dict[Tracked, torch.Tensor] = {}
    for reads, several in _by_reads(gradients):
        known |= reads.norms(several, order)
    if not known:
        return None
    norms = [known.pop(gradient.tracked, None) for gradient in gradients]
    if func not in _OF_MANY:
        return (norms[0],)
    # those whose sums have arrived: no norm depends on the other gradients of the call
    there = [gradient for gradient, norm in zip(gradients, norms, strict=True) if norm is None]
    wait_for_sums(there, order)
    theirs = iter(func([gradient.slot for gradient in there], order) if there else ())
    return (tuple(next(theirs) if norm is None else norm for norm in norms),)


def _scale(func: Any, gradients: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result | None:
    factor = _as_it_is(args[1]) if len(args) == 2 and not kwargs else None
    return None if factor is None else _change(func, gradients, (args[0], factor), {})


def _unscale(func: Any, gradients: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result | None:
    comes_twice = len(set(map(id, gradients))) < len(gradients)
    if len(args) != 3 or kwargs or comes_twice or not all(map(_is_factor, args[1:])):
        return None
    later: set[Tracked] = set()
    for reads, several in _by_reads(gradients):
        later |= reads.unscales(several, args[2])
    there = [gradient.slot for gradient in gradients if gradient.tracked not in later]
    if there:
        func(there, *args[1:])
    return (None,)


def _is_factor(value: Any) -> bool:
    return type(value) is torch.Tensor and value.numel() == 1 and value.dtype is torch.float32


def _limit(func: Any, gradients: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result | None:
    names = _LIMITS[func]
    given = args[1:] or tuple(kwargs.values())
    fits = len(given) <= max(1, len(names)) and kwargs.keys() <= names and not (args[1:] and kwargs)
    numbers = [value for value in given if value is not None]
    # torch refuses tensors beside numbers, and complex gradients
    if not (fits and numbers) or not all(map(_is_number, numbers)):
        return None
    return None if any(gradient.slot.is_complex() for gradient in gradients) else _change(func, gradients, args, kwargs)


def _replace(func: Any, gradients: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result | None:
    given = dict(kwargs)
    if func is torch.nan_to_num and given.pop("out", None) is not args[0]:
        return None
    values = (*args[1:], *given.values())
    if (
        not all(value is None or _is_number(value) for value in values)
        or len(args) > 4
        or not given.keys() <= set(_REPLACED[len(args) - 1 :])
    ):
        return None
    return _change(torch.nan_to_num_, gradients, args, given)


def _change(func: Any, gradients: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    def change(*slots: torch.Tensor) -> None:
        func(list(slots) if func in _OF_MANY else slots[0], *args[1:], **kwargs)

    later: set[Tracked] = set()
    for reads, several in _by_reads(gradients):
        later |= reads.puts_off(several, change)
    there = [gradient.slot for gradient in gradients if gradient.tracked not in later]
    if there:
        change(*there)
    return (args[0],)


def _as_it_is(factor: Any) -> float | torch.Tensor | None:
    """Copy a factor, which the script may change later.

    Returns:
        None for what is no single number, and for a number that torch may refuse: the script's own call has to fail then.
    """
    if _is_number(factor):
        return cast(float, factor)
    if type(factor) is torch.Tensor and factor.dim() == 0 and not factor.requires_grad and not factor.is_complex():
        return factor.clone()
    return None


def _is_number(value: Any) -> bool:
    """Whether torch takes `value` as a number, whatever the call; it may refuse a larger integer."""
    return isinstance(value, (int, float)) and abs(value) < 2**63


# by function, the names of its arguments behind the gradients
_NORMS: dict[Any, tuple[str, ...]] = {
    torch.linalg.vector_norm: ("ord", "dim", "keepdim"),
    torch._foreach_norm: ("ord", "dtype"),
    torch.Tensor.norm: ("p", "dim", "keepdim", "dtype"),
}
# the same of limits, one number if there is no name
_LIMITS: dict[Any, set[str]] = {
    torch.Tensor.clamp_: {"min", "max"},
    torch.Tensor.clip_: {"min", "max"},
    torch.Tensor.clamp_min_: {"min"},
    torch.Tensor.clamp_max_: {"max"},
    torch._foreach_clamp_min_: set(),
    torch._foreach_clamp_max_: set(),
}
_REPLACED = ("nan", "posinf", "neginf")
_SCALES = (torch.Tensor.mul_, torch.Tensor.div_, torch._foreach_mul_, torch._foreach_div_)
_OF_MANY = {
    torch._foreach_norm,
    torch._foreach_mul_,
    torch._foreach_div_,
    torch._foreach_clamp_min_,
    torch._foreach_clamp_max_,
    torch._amp_foreach_non_finite_check_and_unscale_,
}
_EARLY: dict[Any, Callable[..., Result | None]] = (
    dict.fromkeys(_NORMS, _norms)
    | dict.fromkeys(_SCALES, _scale)
    | dict.fromkeys(_LIMITS, _limit)
    | {torch._amp_foreach_non_finite_check_and_unscale_: _unscale}
    | dict.fromkeys((torch.nan_to_num, torch.nan_to_num_, torch.Tensor.nan_to_num_), _replace)
)
