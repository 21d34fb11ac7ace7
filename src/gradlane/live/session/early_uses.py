"""Early uses: what a script may do with a gradient whose sum has not arrived, without a wait for the sum.

There are two. Its norm may be known sooner than the sum (`Norms`). A multiplication in place by a number, as the factor
of `clip_grad_norm_`, gives nothing back but the gradient itself, so that it may run when the sum is there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Result = tuple[Any]
Early = Callable[[Callable[[Any], bool], tuple[Any, ...], dict[str, Any]], Result | None]
"""Does an operation early. Arguments: what says whether a value stands for a sum, and the operation's arguments.

Returns its result in a tuple; None where the operation has to wait for sums.
"""


def early_use(func: Any) -> Early | None:
    """How to do `func`, a function of torch, on gradients whose sums have not arrived; None if it needs them."""
    return _EARLY.get(func)


def order_of_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The order of the norm of whole gradients that the call computes; None if it computes another thing."""
    names = _NORMS.get(func)
    if names is None or not 0 < len(args) <= len(names) + 1:
        return None
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    order = given.pop("ord", given.pop("p", 2.0))
    if any(value is not None and value is not False for value in given.values()):  # dim, keepdim, dtype or out
        return None
    if isinstance(order, str):
        order = {"fro": 2.0, "inf": math.inf}.get(order)
    return float(order) if isinstance(order, (int, float)) else None


def _norm(is_pending: Callable[[Any], bool], args: tuple[Any, ...], kwargs: dict[str, Any], func: Any) -> Result | None:
    order = order_of_norm(func, args, kwargs)
    if order is None or not _are_sums([args[0]], is_pending):
        return None
    norm = args[0].reads.norm(args[0].tracked, order)
    return None if norm is None else (norm,)


def _norm_of_each(is_pending: Callable[[Any], bool], args: tuple[Any, ...], kwargs: dict[str, Any], func: Any) -> Result | None:
    order = order_of_norm(func, args, kwargs)
    if order is None or not _are_sums(args[0], is_pending):
        return None
    norms = [gradient.reads.norm(gradient.tracked, order) for gradient in args[0]]
    if all(norm is None for norm in norms):
        return None
    # those whose sums have arrived: no norm depends on the other gradients of the call
    pairs = zip(args[0], norms, strict=True)
    return (tuple(func([each.current(order)], order)[0] if norm is None else norm for each, norm in pairs),)


def _scale(is_pending: Callable[[Any], bool], args: tuple[Any, ...], kwargs: dict[str, Any], func: Any) -> Result | None:
    if kwargs or len(args) != 2 or not _are_sums([args[0]], is_pending):
        return None
    factor = _as_it_is(args[1])
    if factor is None:
        return None
    if not args[0].reads.puts_off(args[0].tracked, lambda slot: func(slot, factor)):
        func(args[0].slot, factor)
    return (args[0],)


def _scale_each(is_pending: Callable[[Any], bool], args: tuple[Any, ...], kwargs: dict[str, Any], func: Any) -> Result | None:
    if kwargs or len(args) != 2 or not _are_sums(args[0], is_pending):
        return None
    factor = _as_it_is(args[1])
    if factor is None:
        return None
    for gradient in args[0]:
        if not gradient.reads.puts_off(gradient.tracked, lambda slot: func([slot], factor)):
            func([gradient.slot], factor)
    return (args[0],)


def _are_sums(gradients: Sequence[Any], is_pending: Callable[[Any], bool]) -> bool:
    return all(is_pending(gradient) and gradient.reads is not None for gradient in gradients)


def _as_it_is(factor: Any) -> float | torch.Tensor | None:
    """A factor as it is now, whatever the script does to it later; None for what is no single number, or one that torch
    may refuse: that has to be told where the script calls.
    """
    if isinstance(factor, (int, float)):
        return factor if abs(factor) < _LARGE else None
    if type(factor) is torch.Tensor and factor.dim() == 0 and not factor.requires_grad and not factor.is_complex():
        return factor.clone()
    return None


_LARGE = 2**63  # from here on an integer may be more than torch takes


# by function, the names of its arguments behind the gradients
_NORMS: dict[Any, tuple[str, ...]] = {
    torch.linalg.vector_norm: ("ord", "dim", "keepdim"),
    torch._foreach_norm: ("ord", "dtype"),
    torch.Tensor.norm: ("p", "dim", "keepdim", "dtype"),
}
_EARLY: dict[Any, Early] = {
    torch.linalg.vector_norm: functools.partial(_norm, func=torch.linalg.vector_norm),
    torch.Tensor.norm: functools.partial(_norm, func=torch.Tensor.norm),
    torch._foreach_norm: functools.partial(_norm_of_each, func=torch._foreach_norm),
    torch.Tensor.mul_: functools.partial(_scale, func=torch.Tensor.mul_),
    torch.Tensor.div_: functools.partial(_scale, func=torch.Tensor.div_),
    torch._foreach_mul_: functools.partial(_scale_each, func=torch._foreach_mul_),
    torch._foreach_div_: functools.partial(_scale_each, func=torch._foreach_div_),
}
