"""Halves: the sum of one message as a reduce-scatter and an all-gather, of which each rank owns an even share.

Gloo's reduce-scatter tells nobody its end, so that on the CPU ranks exchange their shares and add them here, in rank
order: the same bytes on the wire, and at two ranks the bits of its all-reduce. They do so segment by segment, as Gloo's
all-reduce does by itself: exchanged at once, megabytes both ways keep each other from being acknowledged
(two hosts on 200 Mbit/s: 8 MiB took 177 or 330 ms to exchange, in segments 176 to 187).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_SEGMENT_BYTES = 512 << 10


class TwoPhase:
    """One message's. `scatter`, its works done, then `add`, then `gather`, its works done, then `put_back`."""

    def __init__(self, tensor: torch.Tensor, world: int) -> None:
        share = -(-tensor.numel() // world)
        self._tensor = tensor
        # shares are even: what does not divide travels in a longer copy
        self._whole = tensor if share * world == tensor.numel() else tensor.new_zeros(share * world)
        self._on_cpu = tensor.device.type == "cpu"
        in_segment = share
        if self._on_cpu:
            in_segment = min(share, max(1, _SEGMENT_BYTES // (world * tensor.element_size())))
        self._segments = torch.split(self._whole, in_segment * world)
        """Of each segment a rank owns the part of its place."""
        self._shares = [
            part.new_empty((world if self._on_cpu else 1, part.numel() // world)) for part in self._segments
        ]  # what ranks have of this one's part

    def scatter(self, group: Any) -> list[Any]:
        """Begin the reduce-scatter. Returns torch.distributed's works."""
        if self._whole is not self._tensor:
            self._whole[: self._tensor.numel()] = self._tensor
        if not self._on_cpu:
            return [dist.reduce_scatter_tensor(self._shares[0][0], self._whole, group=group, async_op=True)]
        return [
            dist.all_to_all_single(shares.view(-1), segment, group=group, async_op=True)
            for segment, shares in zip(self._segments, self._shares, strict=True)
        ]

    def add(self) -> None:
        """The shares have come: make this rank's of the sum."""
        for shares in self._shares:
            for share in shares[1:]:
                shares[0].add_(share)

    def gather(self, group: Any) -> list[Any]:
        """Begin the all-gather. Returns torch.distributed's works."""
        return [
            dist.all_gather_single(segment, shares[0], group=group, async_op=True)
            for segment, shares in zip(self._segments, self._shares, strict=True)
        ]

    def put_back(self) -> None:
        """The shares of the sum have come: the message's memory has it."""
        if self._whole is not self._tensor:
            self._tensor.copy_(self._whole[: self._tensor.numel()])
