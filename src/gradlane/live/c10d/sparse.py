"""The sum of sparse tensors: every rank gets the entries of all, and adds them up in rank order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradlane.errors import InputError

Gather = Callable[[list[list[torch.Tensor]], list[torch.Tensor]], Any]


def all_reduce(
    tensor: torch.Tensor, world: int, gather: Gather
) -> tuple[list[list[torch.Tensor]], list[torch.Tensor], Callable[[torch.Tensor], None]]:
    """Begin the sum of `tensor`, a sparse COO tensor on the CPU, over all ranks.

    Waits until all ranks have said how many entries they have: only then is there memory for them.

    Args:
        tensor: of one shape and dtype on all ranks, any number of entries on each.
        world: number of ranks.
        gather: an all-gather of several tensors at once: for each input the outputs by rank. Returns its work.

    Returns:
        The outputs and the inputs of an all-gather of the entries, which the caller makes, and what brings the sum into a
        tensor once that has ended.
    """
    if tensor.layout is not torch.sparse_coo or tensor.device.type != "cpu":
        raise InputError(f"gradlane: got a {tensor.layout} tensor on {tensor.device}, expected a sparse COO one on the CPU")
    mine = tensor.coalesce()
    indices, values = mine.indices().contiguous(), mine.values().contiguous()
    counts = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(world)]
    gather([counts], [torch.tensor([indices.shape[1]], device="cpu")]).wait()
    sizes = [int(count) for count in counts]
    all_indices = [torch.empty((indices.shape[0], size), dtype=torch.int64, device="cpu") for size in sizes]
    all_values = [torch.empty((size, *values.shape[1:]), dtype=values.dtype, device="cpu") for size in sizes]

    def summed(into: torch.Tensor) -> None:
        whole = torch.sparse_coo_tensor(torch.cat(all_indices, dim=1), torch.cat(all_values), into.shape)
        into.copy_(whole.coalesce())

    return [all_indices, all_values], [indices, values], summed
