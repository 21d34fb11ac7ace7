"""Arena: the flat buffers that gradients are summed in, and where each message lies in them.

Each tensor has a slot: its elements in the parameter's own memory order, then one element of presence, then
padding to a cache line. Presence is 1 on a rank that produced the gradient and 0 on one that did not; it is
summed along with the data, so that after the sum a rank knows whether anybody used the parameter without a
message of its own. Slots follow one another in the order of the plan, so that a merge of neighbours is one
range and needs no copy.

Owned by one session; nothing here waits, locks or talks to another rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradlane.core.plan import Message, Plan

_ALIGN = 16  # elements: a cache line of float32, so that no two slots share one


@dataclass(frozen=True)
class _Place:
    buffer: int  # index of the flat buffer
    start: int  # first element of the slot in it
    numel: int  # elements of the tensor, without presence and padding
    end: int  # first element after the slot


class GradientBuffers:
    """Slots for `params` (index = the plan's tensor index) laid out in that order, a buffer a (dtype, device)."""

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        lengths: list[int] = []
        kinds: dict[tuple[torch.dtype, torch.device], int] = {}
        self._places: list[_Place] = []
        for param in params:
            buffer = kinds.setdefault((param.dtype, param.device), len(kinds))
            if buffer == len(lengths):
                lengths.append(0)
            start = lengths[buffer]
            end = -(-(start + param.numel() + 1) // _ALIGN) * _ALIGN
            lengths[buffer] = end
            self._places.append(_Place(buffer, start, param.numel(), end))
        self._buffers = [
            torch.zeros(length, dtype=dtype, device=device) for length, (dtype, device) in zip(lengths, kinds, strict=True)
        ]
        self.slots = [self._slot(place, param) for place, param in zip(self._places, params, strict=True)]
        self.presence = [
            self._buffers[place.buffer][place.start + place.numel : place.start + place.numel + 1] for place in self._places
        ]
        self._presence_index = [
            torch.tensor([p.start + p.numel for p in self._places if p.buffer == index], device=buffer.device)
            for index, buffer in enumerate(self._buffers)
        ]

    def _slot(self, place: _Place, param: torch.nn.Parameter) -> torch.Tensor:
        flat = self._buffers[place.buffer][place.start : place.start + place.numel]
        # not as views: compilers look for what a gradient is a view of
        # channels-last parameters keep their strides, so that updates stay on the optimizer's fast path
        if param.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(param.detach()):
            return flat.view(param.shape).detach()
        return flat.as_strided(param.shape, param.stride(), flat.storage_offset()).detach()

    def mark_all_present(self) -> None:
        """Set every presence element to 1: sums of the iteration before are still in them."""
        for buffer, index in zip(self._buffers, self._presence_index, strict=True):
            buffer.index_fill_(0, index, 1)

    def message_buffers(self, plan: Plan) -> list[MessageBuffer]:
        """Where each message of `plan` lies. Its tensor indices must be this arena's."""
        return [self._message_buffer(message) for message in plan.messages]

    def _message_buffer(self, message: Message) -> MessageBuffer:
        ranges: list[tuple[int, int, int]] = []  # (buffer, start, end)
        for piece in message.slices:
            place = self._places[piece.tensor]
            element = self._buffers[place.buffer].element_size()
            start = place.start + piece.offset_bytes // element
            end = start + piece.size_bytes // element
            if end == place.start + place.numel:
                end = place.end  # the last slice takes presence and padding along
            if ranges and ranges[-1][0] == place.buffer and ranges[-1][2] == start:
                ranges[-1] = (place.buffer, ranges[-1][1], end)
            else:
                ranges.append((place.buffer, start, end))
        return MessageBuffer([self._buffers[buffer][start:end] for buffer, start, end in ranges])


class MessageBuffer:
    """The memory that one message is summed in: a range of the arena, or a staging copy of several."""

    def __init__(self, ranges: list[torch.Tensor]) -> None:
        self._ranges = ranges
        self._staged = len(ranges) > 1
        self.tensor = torch.cat(ranges) if self._staged else ranges[0]

    def gather(self) -> None:
        """Before the sum: bring scattered ranges together."""
        if self._staged:
            torch.cat(self._ranges, out=self.tensor)

    def scatter(self) -> None:
        """After the sum: put scattered ranges back."""
        if self._staged:
            parts = torch.split(self.tensor, [part.numel() for part in self._ranges])
            torch._foreach_copy_(self._ranges, list(parts))
