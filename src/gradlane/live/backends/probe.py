"""Probe: measures what an all-reduce costs between the ranks of a job, for several sizes, alone and
in streams.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs

from gradlane.core.network import Network, Sharing
from gradlane.planning.fit import fit_network
from gradlane.units import NS_PER_SECOND

QUICK_SIZES = tuple(256 * 4**power for power in range(8))  # 256 B .. 4 MiB
STREAM = 8  # messages started together
# a message that takes longer alone is mostly bytes: a stream of such messages says too little about
# startup
LONGEST_IN_STREAM_NS = 30_000_000
Start = Callable[[list[torch.Tensor]], Callable[[], None]]
"""Starts the sum of each tensor; returns a call that waits for all of them."""
FULL_SIZES = tuple(1024 * 2**power for power in range(16))  # 1 KiB .. 32 MiB


def sweep(
    group: Any,
    device: torch.device,
    sizes: tuple[int, ...] = QUICK_SIZES,
    repeats: int = 5,
    budget_s: float = 1.0,
    all_reduce: Callable[[torch.Tensor], Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[tuple[int, int]]:
    """Time single all-reduces of growing sizes (collective).

    The first all-reduce of a size is not counted. Then all sizes are repeated in rounds, the fast
    ones up to four times a round, so that a disturbance of the machine does not fall on one size
    alone.

    Args:
        group: the ranks.
        device: that the tensors are on.
        sizes: in bytes, growing, multiples of 8.
        repeats: rounds.
        budget_s: sizes grow until the rounds of one would take half of it, but at least three sizes
            are measured.
        all_reduce: sums a tensor and waits; None for torch.distributed's all-reduce in `group`.
        dtype: of the tensors; to add halves takes a processor longer, byte for byte.

    Returns:
        (size_bytes, duration_ns) of each all-reduce, where the duration is the longest of all
        ranks; the same on every rank.
    """
    all_reduce = all_reduce or (lambda data: _sum(group, device, [data]))

    swept: list[torch.Tensor] = []
    took_ns: list[int] = []
    for size_bytes in sizes:
        if len(swept) >= 3 and took_ns[-1] * repeats * 2 > budget_s * NS_PER_SECOND:
            break
        swept.append(torch.zeros(size_bytes // dtype.itemsize, dtype=dtype, device=device))
        took_ns += _slowest(group, device, [_timed(device, all_reduce, swept[-1])])
    swept = [
        data for data, taken in zip(swept, took_ns, strict=True) for _ in range(max(1, min(4, took_ns[-1] // (4 * taken))))
    ]
    samples: list[tuple[int, int]] = []
    for _ in range(repeats):
        durations = _slowest(group, device, [_timed(device, all_reduce, data) for data in swept])
        samples += [(data.nbytes, duration) for data, duration in zip(swept, durations, strict=True)]
    return samples


def sweep_streams(
    group: Any,
    device: torch.device,
    alone: list[tuple[int, int]],
    repeats: int = 5,
    dtype: torch.dtype = torch.float32,
    start: Start | None = None,
) -> list[tuple[int, int, int]]:
    """Time streams of 8 all-reduces that are started together (collective).

    Args:
        group, device, repeats, dtype: as for `sweep`.
        alone: the result of `sweep`. Its sizes are measured, but for those that take longer than 30
            ms alone.
        start: starts sums of several tensors; None for torch.distributed's all-reduce in `group`.

    Returns:
        (size_bytes, messages, duration_ns) of each stream; the same on every rank.
    """
    sizes = [
        size_bytes for size_bytes in dict.fromkeys(size for size, _ in alone)
        if min(taken for size, taken in alone if size == size_bytes) <= LONGEST_IN_STREAM_NS
    ]  # fmt: skip
    start = start or partial(_start, group, device)
    # fast sizes are measured twice a round: they cost little, and a stall of milliseconds distorts
    # them most
    longest_ns = max((taken for size, taken in alone if size in sizes), default=0)
    typical_ns = {size: median(taken for each, taken in alone if each == size) for size in sizes}
    sizes = [size for size in sizes for _ in range(2 if 4 * typical_ns[size] < longest_ns else 1)]
    memory = [torch.zeros(max(sizes, default=0) // dtype.itemsize, dtype=dtype, device=device) for _ in range(STREAM)]
    found: list[tuple[int, int, int]] = []
    for _ in range(repeats):
        durations = []
        for size_bytes in sizes:
            dist.barrier(group)
            parts = [part[: size_bytes // dtype.itemsize] for part in memory]
            durations.append(_timed(device, lambda parts: start(parts)(), parts))
        slowest = _slowest(group, device, durations)
        found += [(size_bytes, STREAM, duration) for size_bytes, duration in zip(sizes, slowest, strict=True)]
    return found


def sharing(group: Any, device: torch.device) -> Sharing:
    """How concurrent all-reduces of torch.distributed share the network.

    Gloo has two threads per group. Its ring (gloo/allreduce.cc) moves 1 / workers of a message in
    each of 2 (workers - 1) steps, at most two segments of 1 MiB at once; segments of another
    message go in between. On a device with streams, sums run one after another, and the launch of
    the next overlaps with the one before.
    """
    workers = dist.get_world_size(group)
    if device.type != "cpu" or workers == 1:
        return Sharing(max_in_flight=2)
    return Sharing(max_in_flight=2, chunks=2 * (workers - 1), chunk_bytes=workers * 2 * 2**20)


def measure(group: Any, device: torch.device, source: str, dtype: torch.dtype = torch.float32, **options: Any) -> Network:
    """Measure the network of torch.distributed's all-reduces in `group` (collective).

    Args:
        source: how the network was measured, for its record.
        dtype: of what is summed.
        options: for `sweep`.
    """
    samples = sweep(group, device, dtype=dtype, **options)
    streams = sweep_streams(group, device, samples, dtype=dtype)
    return fit(group, device, samples, streams, measure_start(group, device), source)


def fit(
    group: Any,
    device: torch.device,
    samples: list[tuple[int, int]],
    streams: list[tuple[int, int, int]],
    start_ns: int,
    source: str,
) -> Network:
    """Fit a network to the results of `sweep`, `sweep_streams` and `measure_start`. Not collective."""
    workers = dist.get_world_size(group)
    network = fit_network(samples, workers, streams=streams, sharing=sharing(group, device), source=source)
    return structs.replace(network, start_ns=start_ns)


def measure_start(group: Any, device: torch.device, repeats: int = 9, start: Start | None = None) -> int:
    """Measure what it takes the calling thread to start an all-reduce (collective).

    Args:
        start: as for `sweep_streams`.

    Returns:
        The median over `repeats` streams, of the slowest rank, in ns of processor time; the same on
        every rank.
    """
    memory = [torch.zeros(QUICK_SIZES[0] // 4, device=device) for _ in range(STREAM)]
    start = start or partial(_start, group, device)
    took_ns = []
    for _ in range(repeats):
        begun_ns = time.thread_time_ns()
        wait = start(memory)
        took_ns.append((time.thread_time_ns() - begun_ns) // STREAM)
        wait()
    return _slowest(group, device, [round(median(took_ns))])[0]


def _sum(group: Any, device: torch.device, data: list[torch.Tensor]) -> None:
    _start(group, device, data)()


def _start(group: Any, device: torch.device, data: list[torch.Tensor]) -> Callable[[], None]:
    """Start all sums; return a call that waits for them.

    On the CPU by callback, as a session does where messages wait for others to end: Gloo's thread
    runs the callback before it begins the next sum, so that Python's time there is part of what a
    message costs.
    """
    ended = threading.Semaphore(0)
    works = []
    for each in data:
        work = dist.all_reduce(each, group=group, async_op=True)
        assert work is not None
        if device.type == "cpu":
            work.get_future().add_done_callback(lambda _: ended.release())
        works.append(work)

    def wait() -> None:
        if device.type == "cpu":
            for _ in works:
                ended.acquire()
        for work in works:
            work.wait()

    return wait


def _timed(device: torch.device, work: Callable[[Any], Any], data: Any) -> int:
    wait_for_device(device)
    start = time.monotonic_ns()
    work(data)
    wait_for_device(device)
    return time.monotonic_ns() - start


def _slowest(group: Any, device: torch.device, durations: list[int]) -> list[int]:
    """The longest over ranks of each duration (collective)."""
    shared = torch.tensor(durations, dtype=torch.int64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return [int(duration) for duration in shared.tolist()]


def wait_for_device(device: torch.device) -> None:
    """Wait until a device with streams has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
