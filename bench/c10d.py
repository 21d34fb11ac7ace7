"""all_reduce over gradlane's backend beside torch's Gloo: what the transport itself takes.

Run by `python -m bench`: two ranks of one host, with a DDP step; and four emulated hosts at 1 Gbit/s, with 4 KB and 100 MB
(`gradlane lab --hosts 4 --link 1gbit -- python -m bench.c10d 4096 100000000`). On one host gradlane has two arms: through
memory that the ranks share, and over loopback. Each turn is a few calls of one arm, arms in alternating order; a call ends
when its result is there, and the time of a call is that of the rank that took longer.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradlane.core.records.speedup import Speedup
from gradlane.live import c10d
from gradlane.units import format_bytes

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)  # where none are given
TURNS = 12


def calls(size_bytes: int) -> int:
    return max(1, min(40, (16 << 20) // size_bytes))


def timed(group: dist.ProcessGroup, data: torch.Tensor, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        dist.all_reduce(data, group=group)
        taken.append(time.perf_counter() - began)
    return taken


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        taken.append(time.perf_counter() - began)
    return taken


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"gloo": dist.group.WORLD}
    if "GRADLANE_LAB" in os.environ:
        groups["gradlane"] = dist.new_group(backend="gradlane")
    else:
        groups["loopback"] = dist.new_group(backend="gradlane", pg_options=c10d.Options(shared_memory=False))
        groups["shared"] = dist.new_group(backend="gradlane", pg_options=c10d.Options(shared_memory=True))
    talks = dist.get_rank() == 0
    if talks:
        where = "on emulated hosts" if "GRADLANE_LAB" in os.environ else "on one host"
        print(f"\nc10d {where}, {dist.get_world_size()} ranks: all_reduce of float32, {', '.join(groups)}")
        *others, last = groups
        heads = [f"{f'{arm} ms (p10..p90)':>28}" for arm in groups] + [f"{f'{arm}/{last}':>16}" for arm in others]
        print(f"{'what':>12}", *heads, "  CPU s/GB each")
    given = tuple(map(int, sys.argv[1:]))
    for size_bytes in given or SIZES:
        data = torch.zeros(size_bytes // 4)
        arms = {arm: partial(timed, groups[arm], data) for arm in groups}
        compare(format_bytes(size_bytes), arms, calls(size_bytes), talks, size_bytes)
    if not given:
        compare("DDP step", {arm: partial(steps, *ddp(group)) for arm, group in groups.items()}, 3, talks, 0)
    dist.destroy_process_group()


def ddp(group: Any) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024) for _ in range(8)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), process_group=group)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(32, 1024)


def compare(what: str, arms: Mapping[str, Callable[[int], list[float]]], count: int, talks: bool, size_bytes: int) -> None:
    """All arms in turns; rank 0 prints. size_bytes: of one call, for the CPU's share; 0: unknown."""
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    turns: dict[str, list[float]] = {arm: [] for arm in arms}
    cpu = dict.fromkeys(arms, 0.0)
    for arm in arms:
        arms[arm](max(2, count // 4))
    for turn in range(TURNS):
        for arm in list(arms) if turn % 2 == 0 else list(arms)[::-1]:
            dist.barrier()
            before = time.process_time()
            taken = torch.tensor(arms[arm](count), dtype=torch.float64)
            cpu[arm] += time.process_time() - before
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            times[arm] += taken.tolist()
            turns[arm].append(statistics.median(taken.tolist()))
    if talks:
        *others, last = arms
        ratios = [f"{Speedup.of(turns[arm], turns[last]).ratio:16.2f}" for arm in others]
        gigabytes = TURNS * count * size_bytes / 1e9
        used = " / ".join(f"{cpu[arm] / gigabytes:.2f}" for arm in arms) if gigabytes else ""
        print(f"{what:>12}", *(f"{_spread(times[arm]):>28}" for arm in arms), *ratios, f"  {used}", flush=True)


def _spread(times: list[float]) -> str:
    tenths = statistics.quantiles(times, n=10)
    return f"{statistics.median(times) * 1e3:.3f} ({tenths[0] * 1e3:.3f}..{tenths[-1] * 1e3:.3f})"


if __name__ == "__main__":
    main()
