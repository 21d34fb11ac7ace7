"""Halves: the sum of one message as a reduce-scatter and an all-gather, of which each rank owns an even share.

Gloo's reduce-scatter tells nobody its end, so that on the CPU ranks exchange their shares and add them here, in rank
order: the same bytes on the wire, and at two ranks the bits of its all-reduce.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Halves:
    """One message's. `scatter`, its work done, then `add`, then `gather`, its work done, then `put_back`."""

    def __init__(self, tensor: torch.Tensor, world: int) -> None:
        share = -(-tensor.numel() // world)
        self._tensor = tensor
        # shares are even: what does not divide travels in a longer copy
        self._whole = tensor if share * world == tensor.numel() else tensor.new_zeros(share * world)
        self._on_cpu = tensor.device.type == "cpu"
        self._shares = tensor.new_empty((world if self._on_cpu else 1, share))

    def scatter(self, group: Any) -> Any:
        """Begin the reduce-scatter. Returns torch.distributed's work."""
        if self._whole is not self._tensor:
            self._whole[: self._tensor.numel()] = self._tensor
        if self._on_cpu:
            return dist.all_to_all_single(self._shares.view(-1), self._whole, group=group, async_op=True)
        return dist.reduce_scatter_tensor(self._shares[0], self._whole, group=group, async_op=True)

    def add(self) -> None:
        """The shares have come: make this rank's of the sum."""
        for share in self._shares[1:]:
            self._shares[0].add_(share)

    def gather(self, group: Any) -> Any:
        """Begin the all-gather. Returns torch.distributed's work."""
        return dist.all_gather_single(self._whole, self._shares[0], group=group, async_op=True)

    def put_back(self) -> None:
        """The shares of the sum have come: the message's memory has it."""
        if self._whole is not self._tensor:
            self._tensor.copy_(self._whole[: self._tensor.numel()])
