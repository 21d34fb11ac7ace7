"""StagedNorms: norms of sums that are in CPU memory, computed by the device that the gradients are on.

A device's kernels add in another order than those of the CPU. So an owner's sums go up to their slots as soon as they are
whole, the device computes the norms there, and only those come down again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from gradlane.live.backends.process_groups import OnEnd
from gradlane.live.backends.staging import Staging
from gradlane.live.backends.streams import Streams


class StagedNorms:
    """The norms of one plan. What it is given to call is called on the thread of `Staging`.

    Args:
        staging: of the session.
        streams: of the device.
        owned: the tensors whose sums this rank has.
        order: of the norms.
        count: how many tensors there are.

    Attributes:
        computed: norms of the owned sums, in CPU memory.
        told: norms of all tensors, on the device.
    """

    def __init__(self, staging: Staging, streams: Streams, owned: Sequence[int], order: float, count: int) -> None:
        self._staging, self._owned, self._order = staging, owned, order
        self.computed = streams.host_memory(torch.empty(len(owned), dtype=torch.float64, device="meta"))
        self._leaving = streams.host_memory(torch.empty(count, dtype=torch.float64, device="meta"))
        self.told = torch.zeros(count, dtype=torch.float64, device=staging.device)

    def compute(self, then: OnEnd) -> None:
        """Compute norms of the owned sums, which the mirror has; then call `then`. Any thread."""

        def work() -> None:
            if self._owned:
                norms = norms_of([self._staging.slot(tensor) for tensor in self._owned], self._order)
                self.computed.copy_(norms, non_blocking=True)

        self._staging.run_above(self._owned, work, then)

    def bring_up(self, norms: torch.Tensor, then: OnEnd) -> None:
        """Copy the norms of all tensors to the device; then call `then`. Any thread."""
        self._leaving.copy_(norms)
        self._staging.run_above((), lambda: self.told.copy_(self._leaving, non_blocking=True), then)


def norms_of(gradients: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """Norms with the bits of those that `clip_grad_norm_` takes, as float64 and where the gradients are.

    It takes those of one dtype at once: on a device that is another kernel than for one gradient alone.
    """
    norms: list[torch.Tensor | None] = [None] * len(gradients)
    for dtype in {gradient.dtype for gradient in gradients}:
        places = [place for place, gradient in enumerate(gradients) if gradient.dtype == dtype]
        for place, norm in zip(places, torch._foreach_norm([gradients[place] for place in places], order), strict=True):
            norms[place] = norm
    return torch.stack(cast(list[torch.Tensor], norms)).double()
