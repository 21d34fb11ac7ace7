"""OwnedSum: the sum of one message whose tensors have owners, in two phases, over torch.distributed.

The message's memory has one part for each rank, which may be empty: the tensors that the rank owns. In the first
phase every rank sends each owner its part, and each adds what has come, in rank order. In the second phase owners send
the sums of their parts to all. Both phases go in segments, as those of `TwoPhase` do. A segment has a piece of every
part. At two ranks a sum has the bits of an all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradlane.live.backends.two_phase import SEGMENT_BYTES


class OwnedSum:
    """One message on the CPU, call by call: `scatter`, wait for its works, `add`, `gather`, wait for its works, `copy_out`.

    Args:
        tensor: the message's memory, summed in place: the part of rank 0, that of rank 1, and so on.
        lengths: of the parts, in elements, one for each rank.
        rank: of this process.
        segment_bytes: the most that is sent at once.

    Attributes:
        rank, world: of this process, and how many there are.
    """

    def __init__(self, tensor: torch.Tensor, lengths: Sequence[int], rank: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.rank, self.world = rank, len(lengths)
        parts = torch.split(tensor, list(lengths))
        piece = max(1, segment_bytes // (self.world * tensor.element_size()))
        segments = -(-max(lengths) // piece)
        # by segment and rank, a piece of the rank's part; the last ones are shorter or empty
        self._pieces = [[part[start * piece : (start + 1) * piece] for part in parts] for start in range(segments)]
        self._lengths = [[len(each) for each in pieces] for pieces in self._pieces]
        self._segments = [tensor.new_empty(sum(each)) for each in self._lengths]
        # of each segment this rank's piece, once from every rank; in the second phase once for every rank
        self._copies = [tensor.new_empty((self.world, each[rank])) for each in self._lengths]

    def scatter(self, group: Any) -> list[Any]:
        """Begin to send each owner its part. Returns the works of torch.distributed to wait for."""
        works = []
        for segment, pieces, lengths, copies in zip(self._segments, self._pieces, self._lengths, self._copies, strict=True):
            torch.cat(pieces, out=segment)
            mine = [lengths[self.rank]] * self.world
            works.append(dist.all_to_all_single(copies.view(-1), segment, mine, lengths, group, async_op=True))
        return works

    def add(self) -> None:
        """Add what all ranks have sent to this rank's part, in rank order."""
        for pieces, copies in zip(self._pieces, self._copies, strict=True):
            mine = pieces[self.rank]
            mine.copy_(copies[0])
            for copy in copies[1:]:
                mine.add_(copy)

    def gather(self, group: Any) -> list[Any]:
        """Begin to send this rank's part to all. Returns the works of torch.distributed to wait for."""
        works = []
        for segment, pieces, lengths, copies in zip(self._segments, self._pieces, self._lengths, self._copies, strict=True):
            copies.copy_(pieces[self.rank].expand_as(copies))
            mine = [lengths[self.rank]] * self.world
            works.append(dist.all_to_all_single(segment, copies.view(-1), lengths, mine, group, async_op=True))
        return works

    def copy_out(self) -> None:
        """Copy the sums of the other ranks' parts to the message's memory. It has this rank's own since `add`, and others may
        read them there.
        """
        for segment, pieces, lengths in zip(self._segments, self._pieces, self._lengths, strict=True):
            for rank, (piece, arrived) in enumerate(zip(pieces, torch.split(segment, lengths), strict=True)):
                if rank != self.rank:
                    piece.copy_(arrived)
