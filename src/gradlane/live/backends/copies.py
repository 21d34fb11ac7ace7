"""Copies: one rank's tensors put on all ranks, a comparison between ranks, and a barrier of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from gradlane.live.torch_versions import broadcast_from


def copy_from(rank: int, tensors: Iterable[torch.Tensor], group: Any = None, device: torch.device | None = None) -> None:
    """Broadcast the `tensors` of one rank to all ranks of its group, as DDP does at construction; one
    broadcast for each dtype (collective).

    Args:
        rank: in the group, of the one that has the values.
        tensors: as many and as large on every rank.
        group: carries tensors on `device`; None for the default group.
        device: through which the values go; None for the tensors' own.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:
            by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    for of_dtype in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1).to(device=device) for tensor in of_dtype])
        broadcast_from(rank, flat, group)
        for tensor, values in zip(of_dtype, torch.split(flat, [tensor.numel() for tensor in of_dtype]), strict=True):
            tensor.copy_(values.view(tensor.shape))


def is_equal_on_all(data: bytes, group: Any = None, device: torch.device | None = None) -> bool:
    """Whether every rank of the group has the same `data` (collective).

    Args:
        group: carries tensors on `device`; None for the default group.
        device: None for the CPU.
    """
    digest = int.from_bytes(hashlib.sha256(data).digest()[:7], "big")
    most = torch.tensor([digest, -digest], dtype=torch.int64, device=device or "cpu")
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return bool(most.tolist() == [digest, -digest])


def wait_for_all(group: Any = None, device: torch.device | None = None) -> None:
    """Return when all ranks of the group have come here (collective).

    Args:
        group: carries tensors on `device`; None for the default group.
        device: None for the CPU.
    """
    one = torch.ones(1, dtype=torch.int32, device=device or "cpu")
    dist.all_reduce(one, group=group)
    one.item()  # NCCL's collectives are only queued when they return
