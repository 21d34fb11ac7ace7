"""Parts: the tensors of the node that one collective consists of, and the memory that they read and
write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradlane.errors import InputError
from gradlane.transport.node import ALL, DTYPES, ExchangePart

NUMBERS = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int32: "int32",
    torch.int64: "int64",
}


class Parts:
    """The tensors of one collective, collected before any is started, so that an error in one
    starts none.

    Attributes:
        starts: for each tensor the arguments of `Node.start`: addresses to read and to write (0 for none), bytes, dtype,
            operation, sender, receiver and server (-1 for none). The last is the size in bytes of the tensor that it is a piece
            of, 0 if it is whole.
        exchanged: what goes to and comes from every other rank, for `Node.exchange`; a collective has these or `starts`.
        held: keeps the memory alive until the collective has ended.

    Args:
        piece_bytes: cut what all ranks give or get into pieces of this size, each a tensor of its own; None: do not. One piece
            crosses the network while another is summed on its host.
    """

    def __init__(self, piece_bytes: int | None = None) -> None:
        self._piece_bytes = piece_bytes
        self.starts: list[tuple[int, int, int, str, str, int, int, int, int]] = []
        self.exchanged: list[ExchangePart] = []
        self.held: list[torch.Tensor] = []
        self._finish: list[tuple[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], Any] | None]] = []

    def add(
        self,
        source: torch.Tensor | None,
        into: torch.Tensor | None,
        *,
        op: str = "sum",
        sender: int = -1,
        receiver: int = -1,
        at: int = -1,
    ) -> None:
        """Add one tensor of the node.

        Args:
            source: this rank's contribution, contiguous; None if it has none.
            into: where the result is written, contiguous; None if this rank gets none.
            op: "sum", "min", "max" or "product".
            sender: the only rank that contributes; -1 for all.
            receiver: the only rank that gets the result; -1 for all.
            at: rank whose server handles the tensor; -1 to deal it over all servers.
        """
        known = source if source is not None else into
        if known is None:  # between two other ranks: this one neither knows nor needs its size
            self.starts.append((0, 0, 0, "uint8", op, sender, receiver, at, 0))
            return
        from_address = into_address = 0
        if source is not None:
            from_address = source.data_ptr()
            self.held.append(source)
        if into is not None:
            into_address = into.data_ptr()
            self.held.append(into)
        size = known.numel() * known.element_size()
        dtype = NUMBERS.get(known.dtype, "uint8")
        piece = self._piece_bytes
        if piece is None or size <= piece or (sender != ALL and receiver != ALL):
            self.starts.append((from_address, into_address, size, dtype, op, sender, receiver, at, 0))
            return
        for begin in range(0, size, piece):
            source_at, into_at = from_address and from_address + begin, into_address and into_address + begin
            self.starts.append((source_at, into_at, min(piece, size - begin), dtype, op, sender, receiver, at, size))

    def exchange(self, rank: int, source: torch.Tensor, into: torch.Tensor) -> None:
        """Add what goes to another rank and what comes from it, both contiguous."""
        self.held += [source, into]
        self.exchanged.append(
            ExchangePart(rank, _number(source), source.data_ptr(), source.nbytes, _number(into), into.data_ptr(), into.nbytes)
        )

    def deliver(self, plain: torch.Tensor, tensor: torch.Tensor, then: Callable[[torch.Tensor], Any] | None = None) -> None:
        """Once the collective has ended, call `then` on the result in `plain` and copy it to
        `tensor`.
        """
        if plain is not tensor or then is not None:
            self._finish.append((plain, tensor, then))

    def conclude(self) -> None:
        """The collective has ended: do what `deliver` has asked for."""
        if not self._finish:
            return
        with torch.no_grad():
            for plain, tensor, then in self._finish:
                if then is not None:
                    then(plain)
                if plain is not tensor:
                    tensor.copy_(plain)


def _number(tensor: torch.Tensor) -> int:
    return DTYPES[NUMBERS.get(tensor.dtype, "uint8")]


def listed(tensors: Any) -> list[torch.Tensor]:
    """`tensors` as a list; torch.distributed passes one tensor or several."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a contiguous copy of its values.

    A conjugate or negative view has memory with other values than its own, and a zero tensor has none: the node, which
    sees memory alone, gets a copy. `Parts.deliver` brings a result back through torch, which knows of such views.

    Raises:
        InputError: it is not a dense CPU tensor.
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise InputError(f"gradlane: got a {tensor.layout} tensor on {tensor.device}, expected a dense one on the CPU")
    if _has_other_values(tensor):
        with torch.no_grad():
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _has_other_values(tensor: torch.Tensor) -> bool:
    """Whether the values of `tensor` are not those in its memory."""
    return tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()


def check_alike(one: torch.Tensor, other: torch.Tensor) -> None:
    """Raise `InputError` unless both have the same number of elements and dtype."""
    if one.numel() != other.numel() or one.dtype != other.dtype:
        raise InputError(
            f"gradlane: got {one.numel()} elements of {one.dtype} beside {other.numel()} of {other.dtype}, expected the same"
        )


def copied(given: torch.Tensor, into: torch.Tensor) -> None:
    """Copy what a rank sends to itself, unless both are the same view of the same memory. Raises `InputError` if
    they differ in size or dtype.
    """
    check_alike(given, into)
    is_same_memory = given.data_ptr() == into.data_ptr()
    if is_same_memory and all(each.is_contiguous() and not _has_other_values(each) for each in (given, into)):
        return
    with torch.no_grad():
        into.copy_((given.clone() if is_same_memory else given).reshape(into.shape))


def chunks_of(whole: torch.Tensor, world: int, part: torch.Tensor) -> list[torch.Tensor]:
    """Views of `whole` as one flat piece for each rank, of the size of `part`. Raises `InputError`
    if they do not fit.
    """
    if whole.numel() != world * part.numel() or whole.dtype != part.dtype:
        raise InputError(
            f"gradlane: got {whole.numel()} elements of {whole.dtype} for {world} ranks, "
            f"expected {part.numel()} of {part.dtype} for each"
        )
    if not whole.is_contiguous():
        raise InputError("gradlane: the tensor that holds all ranks' parts must be contiguous")
    flat = whole.view(-1)
    return [flat.narrow(0, rank * part.numel(), part.numel()) for rank in range(world)]


def split(whole: torch.Tensor, sizes: Sequence[int], world: int) -> list[torch.Tensor]:
    """Views of `whole`, cut along its first dimension into `sizes`, or evenly if that is empty.
    Raises `InputError`.
    """
    if not whole.is_contiguous():
        raise InputError("gradlane: all_to_all_single needs contiguous tensors")
    if not sizes and whole.shape[0] % world:
        raise InputError(f"gradlane: all_to_all_single: {whole.shape[0]} rows cannot be divided by {world} ranks")
    return list(torch.split(whole, list(sizes) if sizes else [whole.shape[0] // world] * world))
