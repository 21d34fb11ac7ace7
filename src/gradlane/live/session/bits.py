"""Whether two tensors have the same bits, or a sum of halves those that some order of adding gives."""

from __future__ import annotations

import torch


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    mine, theirs = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(mine, theirs)


def is_sum_of_halves(
    exact: torch.Tensor, total: torch.Tensor, half: torch.dtype, magnitude: torch.Tensor | None, world: int
) -> bool:
    """Whether `total` is a sum of halves, up to the rounding that adding them in any order permits.

    Args:
        exact: their sum in float32.
        total: the sum that arrived.
        half: their dtype.
        magnitude: the sum of their absolute values; None at two ranks, where there is one addition
            and so one result.
        world: number of ranks. Each has added one half.
    """
    total = total.to(exact.dtype)
    if magnitude is None:
        return torch.allclose(exact.to(half).to(exact.dtype), total, rtol=0, atol=0, equal_nan=True)
    limits = torch.finfo(half)
    # no partial sum is larger than `magnitude`, and each addition rounds by half of `eps` of it at most
    slack = world * limits.eps * (magnitude + limits.smallest_normal)
    low, high = ((exact + bound).to(half).to(exact.dtype) for bound in (-slack, slack))
    may_overflow = ~(magnitude + slack <= limits.max)  # NaN too
    return bool(((low <= total) & (total <= high) | may_overflow & ~total.isfinite()).all())
