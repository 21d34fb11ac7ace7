"""GradientBuffers: the flat buffers in which gradients are summed, and the place of each message in
them.

Slots have the dtype of their parameters. The plan's tensors may have another, in which gradients
travel: then a message is summed in memory of its own, and rounded on its way there.

Each tensor has a slot: its elements in the parameter's memory order, one presence element, and
padding to a cache line. A rank sets the presence element to a number above 0 if it produced the
gradient and to 0 if not. It is summed with the data, so that every rank sees whether any rank used
the parameter, without a message for that. Slots lie in the order of the plan's tensors, so that a message that
merges neighbours is one range and needs no copy.

Owned by one session. Nothing here blocks, locks or communicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gradlane.core.plan import Message, Plan
from gradlane.core.profile import DTYPE_BYTES, TensorSpec
from gradlane.transport import CopiedRange

_ALIGN = 16  # elements; in float32 a cache line of 64 bytes, so that no two slots share one


@dataclass(frozen=True)
class _Place:
    buffer: int  # index of the flat buffer
    start: int  # first element of the slot in it
    numel: int  # elements of the tensor, without presence and padding
    end: int  # first element after the slot


class GradientBuffers:
    """Slots for parameters, in one flat buffer for each dtype and device.

    Args:
        params: in the order of the plan's tensors.
        memory: allocates a buffer of the shape and dtype of a tensor, on any device; None for zeros on
            the device of the parameters.

    Attributes:
        slots: for each parameter a tensor of its shape and strides in the buffer's memory.
        presence: for each parameter its presence element, of shape (1,).
    """

    def __init__(
        self, params: Sequence[torch.nn.Parameter], memory: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
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
            torch.zeros(length, dtype=dtype, device=device)
            if memory is None
            else memory(torch.empty(length, dtype=dtype, device="meta"))
            for length, (dtype, device) in zip(lengths, kinds, strict=True)
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
        # detached, so that the slot is not a view: compilers inspect what a gradient is a view of.
        # Channels-last parameters keep their strides, so that the optimizer's update stays on its
        # fast path
        if param.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(param.detach()):
            return flat.view(param.shape).detach()
        return flat.as_strided(param.shape, param.stride(), flat.storage_offset()).detach()

    def mark_all_present(self) -> None:
        """Set every presence element to 1, in place of the last iteration's sums."""
        for buffer, index in zip(self._buffers, self._presence_index, strict=True):
            buffer.index_fill_(0, index, 1)

    def put_absent(self, tensor: int, gradient: torch.Tensor | None, scale: float, counts: bool) -> None:
        """Fill the slot of a tensor that got no gradient in this backward pass.

        Args:
            tensor: the tensor.
            gradient: goes into the slot, times `scale`; None for zeros.
            scale: factor for `gradient`.
            counts: whether this rank used the tensor nevertheless, see `used_by_anybody`.
        """
        if gradient is None:
            self.slots[tensor].zero_()
        else:
            torch.mul(gradient.detach(), scale, out=self.slots[tensor])
        if not counts:
            self.presence[tensor].zero_()

    def used_by_anybody(self, tensor: int) -> bool:
        """Whether any rank produced a gradient for `tensor`, whose sum must have arrived."""
        return float(self.presence[tensor]) != 0

    def put_not_finite(self, tensor: int) -> None:
        """Mark this rank's gradient of `tensor`, before it is ready, as one that is not finite."""
        self.presence[tensor].fill_(math.nan)

    def is_finite(self, tensor: int) -> bool:
        """Whether no rank has marked its gradient of `tensor`, whose sum must have arrived."""
        return math.isfinite(float(self.presence[tensor]))

    def range_of(self, first: int, last: int) -> torch.Tensor:
        """The slots from tensor `first` to tensor `last`, with presence and padding, as one tensor.

        All of them must have one dtype and device.
        """
        begin, end = self._places[first], self._places[last]
        assert begin.buffer == end.buffer, f"tensors {first} and {last} are in different buffers"
        return self._buffers[begin.buffer][begin.start : end.end]

    def runs(self, tensors: Sequence[int]) -> list[tuple[int, int]]:
        """First and last of each run of neighbours in one buffer, of `tensors` in ascending order."""
        runs: list[tuple[int, int]] = []
        for tensor in tensors:
            if runs and runs[-1][1] == tensor - 1 and self._places[tensor].buffer == self._places[tensor - 1].buffer:
                runs[-1] = (runs[-1][0], tensor)
            else:
                runs.append((tensor, tensor))
        return runs

    def message_buffers(self, plan: Plan) -> list[MessageBuffer]:
        """The memory of each message of `plan`, whose tensors must be `params`, in that order."""
        dtypes = [spec.dtype for spec in plan.tensors]
        return [self._message_buffer(message, dtypes[message.tensors[0]]) for message in plan.messages]

    def _message_buffer(self, message: Message, dtype: str) -> MessageBuffer:
        ranges: list[tuple[int, int, int]] = []  # (buffer, start, end)
        lengths: list[int] = []
        for piece in message.slices:
            place = self._places[piece.tensor]
            start = place.start + piece.offset_bytes // DTYPE_BYTES[dtype]
            end = start + piece.size_bytes // DTYPE_BYTES[dtype]
            if end == place.start + place.numel:
                end = place.end  # the last slice of a tensor includes presence and padding
            lengths.append(end - start)
            if ranges and ranges[-1][0] == place.buffer and ranges[-1][2] == start:
                ranges[-1] = (place.buffer, ranges[-1][1], end)
            else:
                ranges.append((place.buffer, start, end))
        parts = [self._buffers[buffer][start:end] for buffer, start, end in ranges]
        return MessageBuffer(parts, getattr(torch, dtype), [self.slots[piece.tensor] for piece in message.slices], lengths)


class MessageBuffer:
    """The memory in which one message is summed: one range of a flat buffer, or a copy of several
    ranges, or of ranges that travel in another dtype.

    Args:
        ranges: the message's parts of the flat buffers, in its order.
        dtype: in which the message travels; None for that of the ranges.
        slots: for each slice of the message the slot of its tensor; also an attribute.
        lengths: of the slices, in elements of `tensor`, with presence and padding; also an attribute.

    Attributes:
        tensor: the memory to sum.
        is_copy: it is not the memory of the ranges itself.
    """

    def __init__(
        self,
        ranges: list[torch.Tensor],
        dtype: torch.dtype | None = None,
        slots: Sequence[torch.Tensor] = (),
        lengths: Sequence[int] = (),
    ) -> None:
        self._ranges, self.slots, self.lengths = ranges, slots, lengths
        dtype = dtype or ranges[0].dtype
        self.is_copy = len(ranges) > 1 or ranges[0].dtype != dtype
        self.tensor = ranges[0].new_zeros(sum(map(len, ranges)), dtype=dtype) if self.is_copy else ranges[0]
        self._copies = list(torch.split(self.tensor, list(map(len, ranges))))

    def copied_ranges(self) -> list[CopiedRange]:
        """The ranges that `gather` and `scatter` copy; none if `tensor` is the memory itself."""
        if not self.is_copy:
            return []
        dtype = self.tensor.dtype
        half = dtype_name(self.tensor)
        return [
            CopiedRange(part.data_ptr(), part.numel() * part.element_size(), None if part.dtype == dtype else half)
            for part in self._ranges
        ]

    def gather(self) -> None:
        """Before the sum: copy the ranges into `tensor`, unless it is the memory itself."""
        if self.is_copy:
            torch._foreach_copy_(self._copies, self._ranges)

    def scatter(self) -> None:
        """After the sum: copy `tensor` back into the ranges, unless it is the memory itself."""
        if self.is_copy:
            torch._foreach_copy_(self._ranges, self._copies)

    def scattering(self, *spans: tuple[int, int]) -> Callable[[], None]:
        """What does `scatter` for some spans of `tensor` alone, each as first element and the first behind it."""
        ranges: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        start = 0
        for part in self._ranges if self.is_copy else ():
            for first, end in spans:
                low, high = max(first, start), min(end, start + len(part))
                if low < high:
                    ranges.append(part[low - start : high - start])
                    copies.append(self.tensor[low:high])
            start += len(part)
        return partial(torch._foreach_copy_, ranges, copies) if ranges else lambda: None


def spec_of(name: str, param: torch.Tensor) -> TensorSpec:
    """The gradient of a parameter, as profiles and plans describe it."""
    return TensorSpec(name, param.numel() * param.element_size(), dtype_name(param))


def dtype_name(tensor: torch.Tensor) -> str:
    """The name of a tensor's dtype, as specs have it."""
    return str(tensor.dtype).removeprefix("torch.")
