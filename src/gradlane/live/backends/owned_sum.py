"""OwnedSum: the sum of one message whose tensors have owners, in two phases; and `Norms`, which owners tell.

The message's memory has one part for each rank, which may be empty: the tensors that the rank owns. In the first
phase every rank sends each owner its part, and each adds what has come, in rank order. In the second phase owners send
the sums of their parts to all. Both phases go in segments, as those of `TwoPhase` do. A segment has a piece of every
part. At two ranks a sum has the bits of an all-reduce.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradlane.core.plan import Ownership
from gradlane.live.backends.process_groups import OnEnd, ProcessGroups, unrecorded
from gradlane.live.backends.two_phase import SEGMENT_BYTES

NORMS_ARE_OF_THE_CPU = (
    "owners compute norms in CPU memory, with other kernels than a device has; expected a model on the CPU, or another policy"
)


class OwnedSum:
    """One message on the CPU, call by call: `scatter`, wait for its works, `add`, `gather`, wait for its works, `copy_out`.

    Args:
        tensor: the message's memory, summed in place: the part of rank 0, that of rank 1, and so on.
        lengths: of the parts, in elements, one for each rank.
        rank: of this process.
        segment_bytes: the most that is sent at once.
    """

    def __init__(self, tensor: torch.Tensor, lengths: Sequence[int], rank: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._rank, self._world = rank, len(lengths)
        parts = torch.split(tensor, list(lengths))
        piece = max(1, segment_bytes // (self._world * tensor.element_size()))
        segments = -(-max(lengths) // piece)
        # by segment and rank, a piece of the rank's part; the last ones are shorter or empty
        self._pieces = [[part[start * piece : (start + 1) * piece] for part in parts] for start in range(segments)]
        self._lengths = [[len(each) for each in pieces] for pieces in self._pieces]
        self._segments = [tensor.new_empty(sum(each)) for each in self._lengths]
        # of each segment this rank's piece, once from every rank; in the second phase once for every rank
        self._copies = [tensor.new_empty((self._world, each[rank])) for each in self._lengths]

    def scatter(self, group: Any) -> list[Any]:
        """Begin to send each owner its part. Returns the works of torch.distributed to wait for."""
        works = []
        for segment, pieces, lengths, copies in zip(self._segments, self._pieces, self._lengths, self._copies, strict=True):
            torch.cat(pieces, out=segment)
            mine = [lengths[self._rank]] * self._world
            works.append(dist.all_to_all_single(copies.view(-1), segment, mine, lengths, group, async_op=True))
        return works

    def add(self) -> None:
        """Add what all ranks have sent to this rank's part, in rank order."""
        for pieces, copies in zip(self._pieces, self._copies, strict=True):
            mine = pieces[self._rank]
            mine.copy_(copies[0])
            for copy in copies[1:]:
                mine.add_(copy)

    def gather(self, group: Any) -> list[Any]:
        """Begin to send this rank's part to all. Returns the works of torch.distributed to wait for."""
        works = []
        for segment, pieces, lengths, copies in zip(self._segments, self._pieces, self._lengths, self._copies, strict=True):
            copies.copy_(pieces[self._rank].expand_as(copies))
            mine = [lengths[self._rank]] * self._world
            works.append(dist.all_to_all_single(segment, copies.view(-1), lengths, mine, group, async_op=True))
        return works

    def copy_out(self) -> None:
        """Copy the sums of all parts to the message's memory."""
        for segment, pieces, lengths in zip(self._segments, self._pieces, self._lengths, strict=True):
            torch._foreach_copy_(pieces, list(torch.split(segment, lengths)))


class Norms:
    """The norms of one iteration's sums, on all ranks, once every first phase has ended.

    Each owner computes those of its tensors, with torch's own kernel and from the whole tensor, so that they have the
    bits of norms that the script would compute. A sum of the ranks' norms brings them to all: only the owner adds another
    number than zero.

    Threads: `first_phase_ended` is called on any thread, for one message after another or at once; all else on the
    training thread.

    Args:
        owners: of the plan.
        slots: the memory of each tensor's sum.
        messages: how many messages an iteration has.
        rank: of this process.
        groups, group: where the norms are summed; nothing else uses that group.
    """

    def __init__(
        self, owners: Ownership, slots: Sequence[torch.Tensor], messages: int, rank: int, groups: ProcessGroups, group: int
    ) -> None:
        self.order = owners.norm
        self._owned = [(tensor, slots[tensor]) for tensor, owner in enumerate(owners.ranks) if owner == rank]
        self._slots = slots
        self._messages, self._groups, self._group = messages, groups, group
        self._lock = threading.Lock()
        self._told = torch.zeros(len(slots), dtype=torch.float64, device="cpu")
        self.begin()

    def begin(self) -> None:
        """An iteration begins."""
        self.are_there = False
        self._missing = self._messages

    def of(self, tensor: int) -> torch.Tensor:
        """The norm of a tensor's sum, of its dtype and without dimensions, in memory of its own. `are_there` must be True."""
        return self._told[tensor].to(self._slots[tensor].dtype, copy=True)

    def first_phase_ended(self, then: OnEnd) -> None:
        """The first phase of one more message has ended, and its owned sums are in their slots.

        Args:
            then: called with None or an error: at once, or after the last message when the norms are there.
        """
        with self._lock:
            self._missing -= 1
            is_last = not self._missing
        if is_last:
            self._exchange(then)
        else:
            then(None)

    def _exchange(self, then: OnEnd) -> None:
        told = self._told.zero_()
        for tensor, slot in self._owned:
            told[tensor] = torch.linalg.vector_norm(slot, self.order)

        def ended(error: BaseException | None) -> None:
            self.are_there = error is None
            then(error)

        self._groups.when_ended([unrecorded(self._groups[self._group].allreduce, [told])], ended)
