"""TwoPhase: the sum of one message as a reduce-scatter and an all-gather (policy `dear`).

With P ranks and a message of S bytes, each rank owns one share of S / P bytes. The first phase gives it the sum of its share,
the second gives every rank all shares.

On the CPU the first phase is an all-to-all, after which each rank adds the P copies of its share, in rank order. Gloo's
reduce-scatter has no future that reports its completion. As many bytes travel, and at two ranks the sum has the same bits as
Gloo's all-reduce. Both phases go in segments of at most 256 KiB. Sent at once, megabytes in both directions delay each other's
acknowledgements: between two hosts at 200 Mbit/s, 8 MiB took 177 or 330 ms, in segments of 512 KiB 176 to 187 ms. With
256 KiB in place of 512, a step of emulated networks took 0.98 to 1.00 of its time under `dear` and 0.93 to 0.98 under `owners`.
With 32 KiB it took longest (bench/notes/auto.md).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gradlane.live.torch_versions import all_gather_single, reduce_scatter_single

SEGMENT_BYTES = 256 << 10


class TwoPhase:
    """One message, call by call: `scatter`, wait for its works, `add`, `gather`, wait for its
    works, `copy_out`.

    Args:
        tensor: the message's memory, summed in place.
        world: number of ranks.
        segment_bytes: the most that is sent at once, on the CPU.
    """

    def __init__(self, tensor: torch.Tensor, world: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        share = -(-tensor.numel() // world)
        self._tensor = tensor
        # every share has the same length: a tensor that does not divide by `world` is sent from a
        # padded copy
        self._whole = tensor if share * world == tensor.numel() else tensor.new_zeros(share * world)
        self._on_cpu = tensor.device.type == "cpu"
        in_segment = share
        if self._on_cpu:
            in_segment = min(share, max(1, segment_bytes // (world * tensor.element_size())))
        self._segments = torch.split(self._whole, in_segment * world)
        """Rank r owns the r-th of `world` equal parts of each segment."""
        self.share = tensor.new_empty(share)
        """This rank's parts of all segments: their sum, once `add` was called."""
        self._shares = torch.split(self.share, in_segment)
        self._copies = [
            part.new_empty((world, part.numel() // world)) for part in self._segments if self._on_cpu
        ]  # row r is what rank r contributes to this rank's part of the segment

    def scatter(self, group: Any) -> list[Any]:
        """Begin the reduce-scatter. Returns the works of torch.distributed to wait for."""
        if self._whole is not self._tensor:
            self._whole[: self._tensor.numel()] = self._tensor
        if not self._on_cpu:
            return [reduce_scatter_single(self.share, self._whole, group=group, async_op=True)]
        return [
            dist.all_to_all_single(copies.view(-1), segment, group=group, async_op=True)
            for segment, copies in zip(self._segments, self._copies, strict=True)
        ]

    def add(self) -> None:
        """Add the ranks' contributions to this rank's share, in rank order."""
        for share, copies in zip(self._shares, self._copies, strict=self._on_cpu):
            share.copy_(copies[0])
            for copy in copies[1:]:
                share.add_(copy)

    def gather(self, group: Any) -> list[Any]:
        """Begin the all-gather. Returns the works of torch.distributed to wait for."""
        return [
            all_gather_single(segment, share, group=group, async_op=True)
            for segment, share in zip(self._segments, self._shares, strict=True)
        ]

    def copy_out(self) -> None:
        """Copy the sum from the padded copy, if there is one, to the message's memory."""
        if self._whole is not self._tensor:
            self._tensor.copy_(self._whole[: self._tensor.numel()])
