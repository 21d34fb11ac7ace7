"""Ranks of tests/live/test_part_groups.py: sessions over process groups of some ranks."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradlane
from gradlane.core.network import Network
from gradlane.errors import GradlaneError, PeerError
from tests.live.loops import Mlp, momentum

GIVEN = Network.line(2, startup_ns=20_000, bytes_per_second=10**9)
STEPS = 6


def _model(seed: int) -> Mlp:
    torch.manual_seed(seed)
    return Mlp()


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, wrapped: nn.Module | None = None
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        x, y = Mlp.batch(generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy((wrapped or model)(x), y).backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def _under_ddp(group: Any, rank: int, seed: int) -> list[torch.Tensor]:
    model = _model(rank)  # other parameters on each rank: those of the group's first must win
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
    return _train(model, momentum(model), seed, wrapped)


def _groups(split: list[list[int]]) -> list[Any]:
    return [dist.new_group(ranks) for ranks in split]


def train(rank: int, world: int, split: list[list[int]], **options: Any) -> list[bool]:
    """For each group of `split` with this rank: whether its parameters end with DDP's bits.

    All sessions of this rank are open at the same time.
    """
    groups = [group for group, ranks in zip(_groups(split), split, strict=True) if rank in ranks]
    expected = [_under_ddp(group, rank, 100 + rank) for group in groups]
    models = [_model(rank) for _ in groups]
    optimizers = [momentum(model) for model in models]
    sessions = [
        gradlane.attach(model, optimizer, process_group=group, timeout=30, **options)
        for model, optimizer, group in zip(models, optimizers, groups, strict=True)
    ]
    found = [_train(model, optimizer, 100 + rank) for model, optimizer in zip(models, optimizers, strict=True)]
    for session in sessions:
        session.close()
    return [all(map(torch.equal, one, other)) for one, other in zip(expected, found, strict=True)]


def train_wrapped(rank: int, world: int, split: list[list[int]]) -> list[bool]:
    """As `train`, with the drop-in; also whether it attached."""
    group = next(group for group, ranks in zip(_groups(split), split, strict=True) if rank in ranks)
    expected = _under_ddp(group, rank, 100 + rank)
    model = _model(rank)
    options = {"policy": "bytescheduler", "network": GIVEN, "timeout": 30}
    wrapped = gradlane.DistributedDataParallel(model, process_group=group, options=options)
    found = _train(model, momentum(model), 100 + rank, wrapped)
    attached = wrapped.session is not None
    if wrapped.session is not None:
        wrapped.session.close()
    return [attached, all(map(torch.equal, expected, found))]


def train_a_grid(rank: int, world: int, **options: Any) -> bool:
    """A model whose halves are trained in groups of their own, as beside tensor parallelism: does it end with DDP's bits?"""
    rows, columns = _groups([[0, 1], [2, 3]]), _groups([[0, 2], [1, 3]])
    pair = (rows[rank // 2], columns[rank % 2])

    def run(attached: bool) -> list[torch.Tensor]:
        torch.manual_seed(rank)
        halves = [nn.Linear(12, 40), nn.Linear(40, 6)]
        optimizers = [momentum(half) for half in halves]
        sessions = []
        called: list[nn.Module] = list(halves)
        if attached:
            for half, optimizer, group in zip(halves, optimizers, pair, strict=True):
                sessions.append(gradlane.attach(half, optimizer, process_group=group, timeout=30, **options))
        else:
            called = [
                nn.parallel.DistributedDataParallel(half, process_group=group) for half, group in zip(halves, pair, strict=True)
            ]
        generator = torch.Generator().manual_seed(100 + rank)
        for _ in range(STEPS):
            x, y = Mlp.batch(generator)
            for optimizer in optimizers:
                optimizer.zero_grad()
            nn.functional.cross_entropy(called[1](torch.tanh(called[0](x))), y).backward()
            for optimizer in optimizers:
                optimizer.step()
        for session in sessions:
            session.close()
        return [param.detach().clone() for half in halves for param in half.parameters()]

    return all(map(torch.equal, run(False), run(True)))


def attach_to(rank: int, world: int, ranks: list[int]) -> tuple[str, str]:
    """What attach gives or raises on this rank, for a group of `ranks`."""
    try:
        session = gradlane.attach(_model(0), process_group=dist.new_group(ranks), timeout=5)
    except GradlaneError as error:
        return type(error).__name__, str(error)
    session.close()
    return type(session).__name__, ""


def lose_a_rank(rank: int, world: int, split: list[list[int]], lost: int, **options: Any) -> tuple[str, int | None, str]:
    """`lost` kills itself in its third iteration: what the others raise, the rank that it names, and its text."""
    group = next(group for group, ranks in zip(_groups(split), split, strict=True) if rank in ranks)
    model = _model(0)
    optimizer = momentum(model)
    session = gradlane.attach(model, optimizer, process_group=group, timeout=30, **options)
    try:
        for step in range(STEPS):
            if rank == lost and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            x, y = Mlp.batch(torch.Generator().manual_seed(rank))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        session.close()
    except GradlaneError as error:
        return type(error).__name__, error.rank if isinstance(error, PeerError) else None, str(error)
    return "trained", None, ""
