"""Norms of gradients, and of gradients that a GradScaler has divided by its scale, with the bits of the script's own calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch

_BATCH_BYTES = 1 << 24
"""Gradients that are multiplied at once: enough for a device, and as much as malloc keeps for the next batch."""


class Multiplication:
    """What `GradScaler.unscale_` does to gradients whose elements are finite.

    Args:
        factor: a number that float32 has.
        device: of the gradients.
    """

    def __init__(self, factor: float, device: torch.device) -> None:
        self.factor = factor
        self._factor, self._has_found = (torch.full((1,), value, dtype=torch.float32, device=device) for value in (factor, 0.0))

    def __call__(self, *gradients: torch.Tensor) -> None:
        """Multiply in place. All are of one dtype."""
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), self._has_found, self._factor)


class OwnedNorms:
    """Norms of the sums that a rank owns, of some messages after others.

    Args:
        owned: by message, the tensors that the rank owns.
        slots: of all tensors, where the norms are computed.
        order: of the norms.

    Attributes:
        table: float64. In the first row norms by tensor, in the second those of multiplied sums, see `both_norms`. Columns of
            other ranks' tensors are zero.
    """

    def __init__(self, owned: Sequence[Sequence[int]], slots: Sequence[torch.Tensor], order: float) -> None:
        device = slots[0].device
        self._slots = [[slots[tensor] for tensor in tensors] for tensors in owned]
        # on the device: the host would wait for it to copy each batch's
        self._columns = [torch.tensor(tensors, dtype=torch.int64, device=device) for tensors in owned]
        self._order = order
        self.table = torch.zeros((2, len(slots)), dtype=torch.float64, device=device)

    def compute(self, messages: Sequence[int], factor: float) -> None:
        """Compute both norms of owned sums of `messages`, which are in their slots. Several threads may, of other messages."""
        slots = [slot for message in messages for slot in self._slots[message]]
        if slots:
            columns = torch.cat([self._columns[message] for message in messages])
            self.table.index_copy_(1, columns, both_norms(slots, self._order, factor))


def both_norms(gradients: Sequence[torch.Tensor], order: float, factor: float) -> torch.Tensor:
    """Norms that `clip_grad_norm_` would take, as float64 and where the gradients are.

    It takes those of one dtype at once: on a device that is another kernel than for one gradient alone.

    Args:
        gradients: at least one; they stay as they are.
        order: of the norms.
        factor: of `GradScaler.unscale_`.

    Returns:
        In the first row norms of the gradients, in the second of gradients that are multiplied by `factor`; zeros if it is 1.
    """
    first = _norms(gradients, order)
    return torch.stack((first, torch.zeros_like(first) if factor == 1 else _norms(gradients, order, factor)))


def _norms(gradients: Sequence[torch.Tensor], order: float, factor: float | None = None) -> torch.Tensor:
    norms: list[torch.Tensor | None] = [None] * len(gradients)
    for places in _batches(gradients):
        batch = [gradients[place] for place in places]
        if factor is not None:
            batch = list(torch._foreach_mul(batch, factor))  # one pass less than a copy and `Multiplication`, with its bits
        for place, norm in zip(places, torch._foreach_norm(batch, order), strict=True):
            norms[place] = norm
    return torch.stack(cast(list[torch.Tensor], norms)).double()


def _batches(gradients: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Places of gradients of one dtype, of `_BATCH_BYTES` together or one that is larger."""
    for dtype in {gradient.dtype for gradient in gradients}:
        batch: list[int] = []
        batch_bytes = 0
        for place, gradient in enumerate(gradients):
            if gradient.dtype != dtype:
                continue
            if batch and batch_bytes + gradient.nbytes > _BATCH_BYTES:
                yield batch
                batch, batch_bytes = [], 0
            batch.append(place)
            batch_bytes += gradient.nbytes
        yield batch
