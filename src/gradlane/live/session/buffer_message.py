"""BufferMessage: one broadcast of a model's buffers, and what rank 0 says in it of the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_ALIGN = 16
_HEADER = _ALIGN  # bytes of a message before its buffers: `BufferMessage.next_at_end` and `is_for_another_try`


class BufferMessage:
    """One broadcast: its bytes, and each buffer's place in them.

    Args:
        buffers: give the dtypes, shapes and device; one or more.
        layout: that of another message for the same buffers.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], layout: list[int] | None = None) -> None:
        offsets, end = [], _HEADER
        for buffer in buffers:
            offsets.append(end)
            end += -(-buffer.numel() * buffer.element_size() // _ALIGN) * _ALIGN
        self.bytes = torch.zeros(end, dtype=torch.uint8, device=buffers[0].device)
        # one object for all messages of one layout, so that identity tells
        self.layout = offsets if layout is None else layout
        self.values = [
            self.bytes[start : start + buffer.numel() * buffer.element_size()].view(buffer.dtype).view(buffer.shape)
            for start, buffer in zip(offsets, buffers, strict=True)
        ]
        self._header = self.bytes[:_HEADER].view(torch.int64)
        self.ended = True
        self.must_come = True  # False: rank 0 may never send it
        self.work: Any = None

    @property
    def next_at_end(self) -> bool:
        """Whether the next regular broadcast comes at the end of a forward pass."""
        return bool(self._header[0])

    @next_at_end.setter
    def next_at_end(self, is_so: bool) -> None:
        self._header[0] = is_so

    @property
    def is_for_another_try(self) -> bool:
        """Whether an error has left the forward pass before the one that it is for."""
        return bool(self._header[1])

    @is_for_another_try.setter
    def is_for_another_try(self, is_so: bool) -> None:
        self._header[1] = is_so

    def alike(self) -> BufferMessage:
        """Make another message of the same layout."""
        return BufferMessage(self.values, self.layout)

    def fill(self, buffers: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.values, list(buffers))

    def same_values(self, other: BufferMessage) -> bool:
        return torch.equal(self.bytes[_HEADER:], other.bytes[_HEADER:])
