"""Measures what an all-reduce costs between the ranks of a job: a sweep of sizes, each several times."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

QUICK_SIZES = tuple(4096 * 4**power for power in range(6))  # 4 KiB .. 4 MiB
FULL_SIZES = tuple(1024 * 2**power for power in range(16))  # 1 KiB .. 32 MiB


def sweep(
    group: Any,
    device: torch.device,
    sizes: tuple[int, ...] = QUICK_SIZES,
    repeats: int = 5,
    budget_s: float = 1.0,
    all_reduce: Callable[[torch.Tensor], Any] | None = None,
) -> list[tuple[int, int]]:
    """(size_bytes, duration_ns) of single all-reduces, each rank at once; the same list on every rank.

    all_reduce: what is measured, where it is not torch.distributed's in `group`.
    A first one of each size is not counted. Sizes are swept in ascending order until the budget is spent,
    but never fewer than three; that it is spent is agreed upon, so that ranks stop alike. Durations
    are the largest over ranks, since a sum ends when its last rank has it.
    """
    all_reduce = all_reduce or partial(dist.all_reduce, group=group)
    samples: list[tuple[int, int]] = []
    began = time.monotonic()
    for index, size_bytes in enumerate(sizes):
        data = torch.zeros(size_bytes // 4, device=device)
        durations = []
        for repeat in range(repeats + 1):
            _wait(device)
            start = time.monotonic_ns()
            all_reduce(data)
            _wait(device)
            if repeat > 0:
                durations.append(time.monotonic_ns() - start)
        shared = torch.tensor([*durations, int(time.monotonic() - began > budget_s)], dtype=torch.int64, device=device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
        samples += [(size_bytes, int(duration)) for duration in shared[:-1].tolist()]
        if index >= 2 and int(shared[-1]):
            break
    return samples


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
