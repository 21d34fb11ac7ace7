"""Probe: measures what an all-reduce costs between the ranks of a job, for several sizes, alone and
in streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec import structs

from gradlane.core.network import Network, Sharing
from gradlane.planning.fit import fit_network
from gradlane.units import NS_PER_SECOND

QUICK_SIZES = tuple(256 * 4**power for power in range(8))  # 256 B .. 4 MiB
STREAM, LONGEST_STREAM = 8, 32  # messages started together
SMALL_BYTES = 256 << 10  # up to this, streams have more messages than `STREAM` ...
STREAM_NS = 100_000_000  # ... as many as take about this, at most
IN_A_ROW, IN_A_ROW_NS = 16, 40_000_000  # so many sums of a small message are timed as one, or as take about this
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

    The first all-reduce of a size is not counted. Then all sizes are repeated in rounds, so that a
    disturbance of the machine does not fall on one size alone. In a round, fast ones are summed up to
    16 times in a row and timed together. Ranks that arrive early wait;
    in a run of 16 that wait is counted once, not 16 times.

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
        (size_bytes, duration_ns) of each all-reduce, or of one of those in a row, where the duration is
        the longest of all ranks; the same on every rank.
    """
    all_reduce = all_reduce or (lambda data: _sum(group, [data]))

    swept: list[torch.Tensor] = []
    took_ns: list[int] = []
    for size_bytes in sizes:
        if len(swept) >= 3 and took_ns[-1] * repeats * 2 > budget_s * NS_PER_SECOND:
            break
        swept.append(torch.zeros(size_bytes // dtype.itemsize, dtype=dtype, device=device))
        took_ns += slowest_of(group, device, [_timed(device, all_reduce, swept[-1])])
    in_a_row = [max(1, min(IN_A_ROW, IN_A_ROW_NS // taken, took_ns[-1] // (4 * taken))) for taken in took_ns]

    def sum_in_a_row(which: int) -> None:
        for _ in range(in_a_row[which]):
            all_reduce(swept[which])

    samples: list[tuple[int, int]] = []
    for _ in range(repeats):
        durations = slowest_of(group, device, [_timed(device, sum_in_a_row, which) for which in range(len(swept))])
        samples += [(data.nbytes, duration // count) for data, duration, count in zip(swept, durations, in_a_row, strict=True)]
    return samples


def sweep_streams(
    group: Any,
    device: torch.device,
    alone: list[tuple[int, int]],
    repeats: int = 5,
    dtype: torch.dtype = torch.float32,
    start: Start | None = None,
) -> list[tuple[int, int, int]]:
    """Time streams of all-reduces that are started together (collective): of 8, and of small messages
    of up to 32. What the first and the last of a stream take by themselves is no part of a message's
    cost.

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
    start = start or partial(_start, group)
    typical_ns = {size: median(taken for each, taken in alone if each == size) for size in sizes}
    messages = {
        size: max(STREAM, min(LONGEST_STREAM, round(STREAM_NS / typical_ns[size]))) if size <= SMALL_BYTES else STREAM
        for size in sizes
    }
    memory = [
        torch.zeros(max(size for size in sizes if messages[size] > place) // dtype.itemsize, dtype=dtype, device=device)
        for place in range(max(messages.values(), default=0))
    ]
    found: list[tuple[int, int, int]] = []
    for _ in range(repeats):
        durations = []
        for size_bytes in sizes:
            dist.barrier(group)
            parts = [part[: size_bytes // dtype.itemsize] for part in memory[: messages[size_bytes]]]
            durations.append(_timed(device, lambda parts: start(parts)(), parts))
        slowest = slowest_of(group, device, durations)
        found += [(size_bytes, messages[size_bytes], taken) for size_bytes, taken in zip(sizes, slowest, strict=True)]
    return found


def sharing(group: Any, device: torch.device) -> Sharing:
    """How concurrent all-reduces of torch.distributed share the network.

    Gloo has two threads per group. Its ring (gloo/allreduce.cc) moves 1 / workers of a message in each of 2 (workers - 1)
    steps, at most two segments of 1 MiB at once. Segments of another message go in between. On a device with streams, sums run
    one after another, and the launch of the next overlaps with the one before. Whether switches look at classes of lanes is not
    measured, and taken to be no.
    """
    workers = dist.get_world_size(group)
    if device.type != "cpu" or workers == 1:
        return Sharing(max_in_flight=2, network_classes=1)
    return Sharing(max_in_flight=2, chunks=2 * (workers - 1), chunk_bytes=workers * 2 * 2**20, network_classes=1)


class Probed(NamedTuple):
    """What all-reduces took, once or several times: results of `sweep`, `sweep_streams`, `measure_start`
    and `measure_wakeup`. The same on every rank.
    """

    samples: list[tuple[int, int]]
    streams: list[tuple[int, int, int]]
    start_ns: list[int]
    wakeup_ns: list[int]

    def and_later(self, later: Probed) -> Probed:
        """Both, as if measured together."""
        samples, streams = self.samples + later.samples, self.streams + later.streams
        return Probed(samples, streams, self.start_ns + later.start_ns, self.wakeup_ns + later.wakeup_ns)

    def network(self, group: Any, device: torch.device, source: str) -> Network:
        """Fit a network. Not collective.

        Args:
            source: how the network was measured, for its record.
        """
        workers = dist.get_world_size(group)
        network = fit_network(self.samples, workers, streams=self.streams, sharing=sharing(group, device), source=source)
        start_ns, wakeup_ns = round(median(self.start_ns)), max(0, round(median(self.wakeup_ns)))
        return structs.replace(network, start_ns=start_ns, wakeup_ns=wakeup_ns)


def measure(
    group: Any, device: torch.device, dtype: torch.dtype = torch.float32, budget_s: float = 1.0, **options: Any
) -> Probed:
    """Measure torch.distributed's all-reduces in `group` (collective).

    Args:
        dtype: of what is summed.
        budget_s: see `sweep`; half of it again goes to the wake-up.
        options: for `sweep`.
    """
    samples = sweep(group, device, dtype=dtype, budget_s=budget_s, **options)
    streams = sweep_streams(group, device, samples, dtype=dtype)
    wakeup_ns = measure_wakeup(group, device, budget_s=budget_s / 2)
    return Probed(samples, streams, [measure_start(group, device)], wakeup_ns)


def measure_start(group: Any, device: torch.device, repeats: int = 9, start: Start | None = None) -> int:
    """Measure what it takes the calling thread to start an all-reduce (collective).

    Args:
        start: as for `sweep_streams`.

    Returns:
        The median over `repeats` streams, of the slowest rank, in ns of processor time; the same on
        every rank.
    """
    memory = [torch.zeros(QUICK_SIZES[0] // 4, device=device) for _ in range(STREAM)]
    start = start or partial(_start, group)
    took_ns = []
    for _ in range(repeats):
        begun_ns = time.thread_time_ns()
        wait = start(memory)
        took_ns.append((time.thread_time_ns() - begun_ns) // STREAM)
        wait()
    return slowest_of(group, device, [round(median(took_ns))])[0]


def measure_wakeup(group: Any, device: torch.device, repeats: int = 45, budget_s: float = 0.5) -> list[int]:
    """Measure how much later a sum starts by the callback of the one before it than by a thread that
    waited for that (collective).

    The thread that trains uses each sum meanwhile, as a session does: it updates a parameter. Three and four emulated hosts on
    two cores: with callbacks alone, sums took 0 to 9 % longer than with a thread. With an optimizer's step for each sum it was
    8 to 23 %.

    Args:
        repeats: runs of 16 small sums each way; fewer where they would take longer than `budget_s`, but
            at least 3.

    Returns:
        For each pair of runs the difference, of the slowest rank, in ns a sum; the same on every rank.
        It may be below 0. Zeros on a device with streams, where no message waits for an end.
    """
    if device.type != "cpu":
        return [0]
    memory = [torch.zeros(QUICK_SIZES[0] // 4, device="cpu") for _ in range(2 * STREAM)]
    update = _Update(memory[0])

    def by_thread(memory: list[torch.Tensor]) -> None:
        for each in memory:
            _sum(group, [each])

    def by_callbacks(memory: list[torch.Tensor]) -> None:
        _Chain(group, memory).run(update)

    took_ns: list[list[int]] = []
    while len(took_ns) < repeats:
        dist.barrier(group)
        took_ns.append([_timed(device, by_thread, memory), _timed(device, by_callbacks, memory)])
        if len(took_ns) == 1:
            fit_in = int(budget_s * NS_PER_SECOND) // max(1, sum(slowest_of(group, device, took_ns[0])))
            repeats = max(min(3, repeats), min(repeats, fit_in))
    waited_ns, told_ns = (slowest_of(group, device, list(each)) for each in zip(*took_ns, strict=True))
    return [(told - waited) // len(memory) for told, waited in zip(told_ns, waited_ns, strict=True)]


class _Update:
    """What Adam computes for one parameter, without an optimizer, of whose steps a script's hooks would hear."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self._gradient = gradient
        self._parameter, self._average, self._squares = (torch.zeros_like(gradient) for _ in range(3))

    def __call__(self) -> None:
        self._average.lerp_(self._gradient, 0.1)
        self._squares.mul_(0.999).addcmul_(self._gradient, self._gradient, value=0.001)
        self._parameter.addcdiv_(self._average, self._squares.sqrt().add_(1e-8), value=-0.001)


class _Chain:
    """A chain of sums: each one's callback starts the next, as when a window is full."""

    def __init__(self, group: Any, data: list[torch.Tensor]) -> None:
        self._group, self._coming = group, iter(data)
        self._works: list[Any] = []
        self._ends: SimpleQueue[bool] = SimpleQueue()  # of each sum that has ended: whether another one was started

    def run(self, use: Callable[[], None]) -> None:
        """Sum all, call `use` at each end, and forget the works: they refer to this object, and would keep the group's
        connections open.
        """
        goes_on = self._start_next()
        while goes_on:
            goes_on = self._ends.get()
            use()
        while self._works:
            self._works.pop(0).wait()

    def _start_next(self) -> bool:
        each = next(self._coming, None)
        if each is None:
            return False
        try:
            work = dist.all_reduce(each, group=self._group, async_op=True)
        except RuntimeError:  # a connection is broken, as a work before says
            return False
        assert work is not None
        self._works.append(work)
        work.get_future().add_done_callback(lambda _: self._ends.put(self._start_next()))
        return True


def _sum(group: Any, data: list[torch.Tensor]) -> None:
    _start(group, data)()


def _start(group: Any, data: list[torch.Tensor]) -> Callable[[], None]:
    """Start all sums, as a session does; return a call that waits for them."""
    works = []
    for each in data:
        work = dist.all_reduce(each, group=group, async_op=True)
        assert work is not None
        works.append(work)

    def wait() -> None:
        for work in works:
            work.wait()

    return wait


def _timed(device: torch.device, work: Callable[[Any], Any], data: Any) -> int:
    wait_for_device(device)
    start = time.monotonic_ns()
    work(data)
    wait_for_device(device)
    return time.monotonic_ns() - start


def slowest_of(group: Any, device: torch.device, durations: list[int]) -> list[int]:
    """The longest over ranks of each duration (collective)."""
    shared = torch.tensor(durations, dtype=torch.int64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return [int(duration) for duration in shared.tolist()]


def wait_for_device(device: torch.device) -> None:
    """Wait until a device with streams has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
