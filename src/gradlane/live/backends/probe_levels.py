"""Probe of hosts with several ranks: what sums within a host cost, and what they cost between hosts,
as hierarchical sums carry them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec import structs

from gradlane.core.network import Network, Sharing
from gradlane.live.backends.hierarchy import ENTER, PIECE_BYTES, HierarchicalSum, Stages, Step, nothing
from gradlane.live.backends.probe import QUICK_SIZES, measure_start, slowest_of, sweep, sweep_streams
from gradlane.live.torch_versions import broadcast_from
from gradlane.planning.fit import fit_bus, fit_network

_CPU = torch.device("cpu")
_BUDGET_WITHIN = 0.25  # of the time that sizes between hosts get
_SIZES_WITHIN = QUICK_SIZES[2:]
_TURNS = 5
# every message queues behind the pieces of those before it
_SHARING = Sharing(max_in_flight=2, network_classes=1)

Pieces = Sequence[Sequence[Step]]
"""The pieces of a tensor, each with its steps."""


class Levels(NamedTuple):
    """What was timed: (size_bytes, duration_ns) of whole messages, each the longest of all ranks.

    Attributes:
        reduce_scatter, all_gather, broadcast: within the hosts, all hosts at once.
        between: what is between hosts of a message, over all cards at once.
        streams: (size_bytes, messages, duration_ns) of such messages that started together.
        start_ns: what it takes the calling thread to start a sum.
        hosts, devices: how many, and the ranks on each.
    """

    reduce_scatter: list[tuple[int, int]]
    all_gather: list[tuple[int, int]]
    broadcast: list[tuple[int, int]]
    between: list[tuple[int, int]]
    streams: list[tuple[int, int, int]]
    start_ns: int
    hosts: int
    devices: int

    def network(self, source: str) -> Network:
        """The network that fits, with a bus.

        Of the startups within hosts all is latency: the stages of several messages overlap, and what
        limits messages in a row is what each costs between hosts.

        Args:
            source: how it was measured.
        """
        bus = fit_bus(self.reduce_scatter + self.all_gather, self.devices, packet_bytes=PIECE_BYTES, source=source)
        bus = structs.replace(bus, latency_ns=bus.startup_ns)
        between = fit_network(self.between, self.hosts, streams=self.streams, sharing=_SHARING, source=source)
        return structs.replace(between, workers=self.hosts * self.devices, start_ns=self.start_ns, bus=bus)


def time_levels(
    stages: Stages, group: Any, dtype: torch.dtype, budget_s: float, sizes: tuple[int, ...] = QUICK_SIZES
) -> Levels:
    """Time both levels (collective). Nothing may be under way.

    Args:
        stages: what carries the sums.
        group: of all ranks.
        dtype: of the tensors.
        budget_s, sizes: between hosts, see `probe.sweep`; the time within hosts comes on top.
    """
    reduce_scatter, all_gather, broadcast = (
        sweep(group, _CPU, _SIZES_WITHIN, 5, budget_s * _BUDGET_WITHIN, BlockingSums(stages, pieces).sum, dtype)
        for pieces in (_enter, _leave, _broadcast)
    )
    between = BlockingSums(stages, _between)
    alone = sweep(group, _CPU, sizes, 5, budget_s, between.sum, dtype)
    streams = sweep_streams(group, _CPU, alone, dtype=dtype, start=between.start)
    start_ns = measure_start(group, _CPU, start=BlockingSums(stages).start)
    hosts, devices = len(stages.hosts.peers), len(stages.hosts.mine)
    return Levels(reduce_scatter, all_gather, broadcast, alone, streams, start_ns, hosts, devices)


def in_turns(stages: Stages, group: Any, dtype: torch.dtype, size_bytes: int) -> tuple[int, int]:
    """Time equal messages, summed flat and hierarchically in turns (collective).

    Args:
        stages: what carries hierarchical sums.
        group: of all ranks, which carries flat ones.
        dtype: of the tensors.
        size_bytes: of a message.

    Returns:
        The medians over turns, in ns, of the slowest rank; the same on every rank.
    """
    data = torch.zeros(size_bytes // dtype.itemsize, dtype=dtype, device="cpu")
    arms: tuple[Callable[[torch.Tensor], Any], ...] = (
        lambda data: dist.all_reduce(data, group=group),
        BlockingSums(stages).sum,
    )
    took_ns: list[list[int]] = [[] for _ in arms]  # of each turn
    for _ in range(_TURNS + 1):
        for taken, run in zip(took_ns, arms, strict=True):
            dist.barrier(group)
            began_ns = time.monotonic_ns()
            run(data)
            taken.append(time.monotonic_ns() - began_ns)
    slowest = (slowest_of(group, _CPU, taken) for taken in took_ns)
    flat_ns, hierarchical_ns = (round(median(taken[1:])) for taken in slowest)  # the first has made its memory
    return flat_ns, hierarchical_ns


class BlockingSums:
    """Hierarchical sums, or a part of them, that are waited for.

    Args:
        stages: what carries them.
        pieces: the part of a sum that is done; all of it where nothing else is said.
    """

    def __init__(self, stages: Stages, pieces: Callable[[HierarchicalSum], Pieces] = lambda sums: sums.first_phase) -> None:
        self._stages, self._pieces = stages, pieces
        self._made: dict[tuple[int, int], Pieces] = {}

    def start(self, parts: list[torch.Tensor]) -> Callable[[], None]:
        """Start with each of `parts`; returns a call that waits for all."""
        ended: SimpleQueue[BaseException | None] = SimpleQueue()
        for part in parts:
            key = part.data_ptr(), part.numel()
            if key not in self._made:  # which keeps the memory, so that no other tensor gets its address
                self._made[key] = self._pieces(HierarchicalSum(part, self._stages.hosts))
            self._stages.start(self._made[key], ended.put)

        def wait() -> None:
            for error in [ended.get() for _ in parts]:
                if error is not None:
                    raise error

        return wait

    def sum(self, data: torch.Tensor) -> None:
        self.start([data])()


def _enter(sums: HierarchicalSum) -> Pieces:
    return [(step,) for step in sums.enter]


def _between(sums: HierarchicalSum) -> Pieces:
    return [(step,) for step in sums.between]


def _leave(sums: HierarchicalSum) -> Pieces:
    return [(step,) for step in sums.leave]


def _broadcast(sums: HierarchicalSum) -> Pieces:
    return [(Step(ENTER, partial(_broadcast_from_first, piece), nothing),) for piece in sums.pieces]


def _broadcast_from_first(piece: torch.Tensor, group: Any) -> list[Any]:
    return [broadcast_from(0, piece, group, async_op=True)]
