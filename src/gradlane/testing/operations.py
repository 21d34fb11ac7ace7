"""What operations of torch do to the memory of their arguments, by their schemas."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["device", "pinned", "number"]
"""Whose memory it is: the device's; the host's, pinned; or the host's, for one number."""
_Effect = Literal["reads", "writes", "writes in training", "nothing"]

# they take tensors for their shape or their place alone
_LOOKS_AT_SHAPES = ("set_", "record_stream", "is_same_size", "is_pinned")
# their schemas do not say that they write running statistics
_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
# the host needs what they find
_TOLD_TO_HOST = (
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
)  # fmt: skip
_COPIES = ("copy_", "_foreach_copy_", "_to_copy")


@dataclass(frozen=True)
class Effects:
    """What an operation does to the memory of its arguments."""

    name: str  # as `aten.add_.Tensor`
    arguments: tuple[tuple[int, str, _Effect], ...]  # those with tensors: place, name, effect
    is_told_to_host: bool
    is_copy: bool
    is_constant: bool  # a constant of Python becomes a tensor
    flag: tuple[int, str] | None  # `training` of a batch norm, `non_blocking` of a copy

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], ...]:
        """The tensors that are read, those that are written, and the others."""
        found: tuple[list[torch.Tensor], ...] = ([], [], [])
        for place, name, effect in self.arguments:
            value = args[place] if place < len(args) else kwargs.get(name)
            if effect == "writes in training":
                effect = "writes" if self._flagged(args, kwargs) else "reads"
            found[0 if effect == "reads" else 1 if effect == "writes" else 2].extend(tensors_in(value))
        return found

    def waits(self, kinds: set[Kind], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the host waits until the operation is over."""
        return self.is_told_to_host or (self.is_copy and "pinned" in kinds and not self._flagged(args, kwargs))

    def _flagged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.flag is None:
            return False
        place, name = self.flag
        return bool(args[place] if place < len(args) else kwargs.get(name, False))


@functools.cache
def effects_of(func: Any) -> Effects:
    schema = func._schema
    space, _, name = schema.name.partition("::")
    flags = [(place, each.name) for place, each in enumerate(schema.arguments) if each.name in ("training", "non_blocking")]
    return Effects(
        str(func),
        tuple(
            (place, each.name, _effect(space, name, each))
            for place, each in enumerate(schema.arguments)
            if "Tensor" in str(each.type)
        ),
        is_told_to_host=space == "aten" and name in _TOLD_TO_HOST,
        is_copy=space == "aten" and name in _COPIES,
        is_constant=name == "lift_fresh",
        flag=flags[0] if flags else None,
    )


def _effect(space: str, name: str, argument: Any) -> _Effect:
    if space == "c10d":  # their schemas do not say what they write
        return "reads" if argument.name.startswith("input") or name == "send" else "writes"
    if name in _LOOKS_AT_SHAPES or name.endswith("_like") or name.startswith("new_"):
        return "nothing"
    if name in _BATCH_NORMS and argument.name in ("running_mean", "running_var"):
        return "writes in training"
    if argument.alias_info is None:
        return "reads"
    return "writes" if argument.alias_info.is_write else "nothing"  # of what becomes a view


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an argument, or a result, that have memory."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and (type(value) in _PLAIN or value.untyped_storage().device.type != "meta"):
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of `tensor` in its storage, and the one after its last."""
    size = tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    if tensor.numel() == 0:
        return begin, begin
    if tensor.is_contiguous():
        return begin, begin + int(tensor.numel()) * size
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (int(last) + 1) * size
