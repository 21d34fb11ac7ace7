"""Measures what an all-reduce costs between the ranks of a job: a sweep of sizes, each several times, alone and in streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gradlane.core.network import Network, Sharing
from gradlane.planning.fit import fit_network
from gradlane.units import NS_PER_SECOND

QUICK_SIZES = tuple(256 * 4**power for power in range(8))  # 256 B .. 4 MiB
STREAM = 8  # messages
# a stream of messages that take longer alone has too little startup in it to tell anything
LONGEST_IN_STREAM_NS = 30_000_000
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
    A first one of each size is not counted. Sizes grow until all of one's would take half of the budget, but there are never
    fewer than three; that is agreed upon, so that ranks stop alike. Then they are repeated in turns, so
    that what disturbs the machine for a while disturbs no size alone; short ones up to four times a turn. Durations are
    the largest over ranks, since a sum ends when its last rank has it.
    """
    all_reduce = all_reduce or (lambda data: _sum(group, device, [data]))

    swept: list[torch.Tensor] = []
    took_ns: list[int] = []
    for size_bytes in sizes:
        if len(swept) >= 3 and took_ns[-1] * repeats * 2 > budget_s * NS_PER_SECOND:
            break
        swept.append(torch.zeros(size_bytes // 4, device=device))
        took_ns += _slowest(group, device, [_timed(device, all_reduce, swept[-1])])
    swept = [
        data for data, taken in zip(swept, took_ns, strict=True) for _ in range(max(1, min(4, took_ns[-1] // (4 * taken))))
    ]
    samples: list[tuple[int, int]] = []
    for _ in range(repeats):
        durations = _slowest(group, device, [_timed(device, all_reduce, data) for data in swept])
        samples += [(data.numel() * 4, duration) for data, duration in zip(swept, durations, strict=True)]
    return samples


def sweep_streams(
    group: Any, device: torch.device, alone: list[tuple[int, int]], repeats: int = 5
) -> list[tuple[int, int, int]]:
    """(size_bytes, messages, duration_ns) of all-reduces started together, of the sizes that `alone`, from `sweep`, has
    and that do not take long; the same list on every rank.
    """
    sizes = [
        size_bytes for size_bytes in dict.fromkeys(size for size, _ in alone)
        if min(taken for size, taken in alone if size == size_bytes) <= LONGEST_IN_STREAM_NS
    ]  # fmt: skip
    # as in `sweep`: short ones weigh little, and what stalls for some milliseconds weighs on them most
    longest_ns = max((taken for size, taken in alone if size in sizes), default=0)
    typical_ns = {size: median(taken for each, taken in alone if each == size) for size in sizes}
    sizes = [size for size in sizes for _ in range(2 if 4 * typical_ns[size] < longest_ns else 1)]
    memory = [torch.zeros(max(sizes, default=0) // 4, device=device) for _ in range(STREAM)]
    found: list[tuple[int, int, int]] = []
    for _ in range(repeats):
        durations = []
        for size_bytes in sizes:
            dist.barrier(group)
            durations.append(_timed(device, partial(_sum, group, device), [part[: size_bytes // 4] for part in memory]))
        slowest = _slowest(group, device, durations)
        found += [(size_bytes, STREAM, duration) for size_bytes, duration in zip(sizes, slowest, strict=True)]
    return found


def sharing(group: Any, device: torch.device) -> Sharing:
    """How torch.distributed's all-reduces share the network.

    Gloo has two threads a group, and its ring (gloo/allreduce.cc) moves a part of 1 / workers of the message in each of
    2 (workers - 1) steps, no more than two segments of 1 MiB at once; the other's segments pass between. On a device
    with streams sums follow one another, the next one's launch hidden behind the one before.
    """
    workers = dist.get_world_size(group)
    if device.type != "cpu" or workers == 1:
        return Sharing(max_in_flight=2)
    return Sharing(max_in_flight=2, chunks=2 * (workers - 1), chunk_bytes=workers * 2 * 2**20)


def measure(group: Any, device: torch.device, source: str, **options: Any) -> Network:
    """The network of torch.distributed's all-reduces in `group` (collective). options: of `sweep`."""
    samples = sweep(group, device, **options)
    return fit(group, device, samples, sweep_streams(group, device, samples), source)


def fit(
    group: Any, device: torch.device, samples: list[tuple[int, int]], streams: list[tuple[int, int, int]], source: str
) -> Network:
    """The network that `sweep` and `sweep_streams` have found."""
    workers = dist.get_world_size(group)
    return fit_network(samples, workers, streams=streams, sharing=sharing(group, device), source=source)


def _sum(group: Any, device: torch.device, data: list[torch.Tensor]) -> None:
    """Start all sums and wait for them, on the CPU as a session does: Gloo's thread tells of an end before it takes up the
    next sum, so that what Python costs there is a part of every message.
    """
    ended = threading.Semaphore(0)
    works = []
    for each in data:
        work = dist.all_reduce(each, group=group, async_op=True)
        assert work is not None
        if device.type == "cpu":
            work.get_future().add_done_callback(lambda _: ended.release())
        works.append(work)
    if device.type == "cpu":
        for _ in works:
            ended.acquire()
    for work in works:
        work.wait()


def _timed(device: torch.device, work: Callable[[Any], Any], data: Any) -> int:
    _wait(device)
    start = time.monotonic_ns()
    work(data)
    _wait(device)
    return time.monotonic_ns() - start


def _slowest(group: Any, device: torch.device, durations: list[int]) -> list[int]:
    """Of each, the longest over ranks (collective)."""
    shared = torch.tensor(durations, dtype=torch.int64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return [int(duration) for duration in shared.tolist()]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
