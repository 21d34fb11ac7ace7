"""What the ranks of `test_uneven` run: training on as many batches as each rank has, under DDP's `join()` and the session's."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane
from gradlane.errors import GradlaneError
from tests.live.cases import bits_of, differences
from tests.live.loops import GIVEN, POLICIES, Mlp, momentum
from tests.live.networks import counting_deferred_updates, slow_network

Counts = tuple[int, ...]


def _train(rank: int, model: Mlp, call: Any, optimizer: torch.optim.Optimizer, joined: Any, epochs: list[Counts]) -> Any:
    """Train an epoch after the other, each on as many batches as this rank has in it; losses and last gradients."""
    generator, seen = torch.Generator().manual_seed(1000 + rank), {}
    for epoch, counts in enumerate(epochs):
        with joined():
            for step in range(counts[rank]):
                x, y = model.batch(generator)
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(call(x), y)
                loss.backward()
                optimizer.step()
                seen[f"loss {epoch}.{step}"] = loss.detach()
        for name, param in model.named_parameters():
            if param.grad is not None:
                seen[f"gradient {epoch}.{name}"] = param.grad.clone()
    return seen


def _attached(rank: int, world: int, policy: str, **options: Any) -> tuple[Mlp, torch.optim.Optimizer, Any]:
    torch.manual_seed(7 + rank)
    model = Mlp()
    optimizer = momentum(model)
    network = None if policy == "auto" else gradlane.Network.line(world, GIVEN.startup_ns, GIVEN.bytes_per_second)
    chosen = policy if policy == "auto" else gradlane.policies.get(policy, **POLICIES.get(policy, {}))
    return model, optimizer, gradlane.attach(model, optimizer, chosen, network=network, timeout=20, **options)


def equals_ddp(
    rank: int, world: int, policy: str, backend: str, epochs: list[Counts], join: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """What differs from training under DDP's `join()`; how many updates were deferred."""
    torch.manual_seed(7)
    model = Mlp()
    optimizer = momentum(model)
    wrapped = DistributedDataParallel(model)
    seen = _train(rank, model, wrapped, optimizer, partial(wrapped.join, **join), epochs)
    reference = {**bits_of(model, optimizer), **seen}

    with slow_network(), counting_deferred_updates() as deferred:
        model, optimizer, session = _attached(rank, world, policy, backend=backend, **options)
        with session:
            seen = _train(rank, model, model, optimizer, partial(session.join, **join), epochs)
            settled = session.settled
            session.flush()
    return {
        "differs": differences(reference, {**bits_of(model, optimizer), **seen}),
        "deferred": sum(deferred),
        "settled": settled,
    }


def ends_alike(rank: int, world: int, epochs: list[Counts], **options: Any) -> dict[str, torch.Tensor]:
    """The parameters at the end."""
    model, optimizer, session = _attached(rank, world, "bytescheduler", **options)
    with session:
        _train(rank, model, model, optimizer, session.join, epochs)
    return {name: param.detach() for name, param in model.named_parameters()}


def ends_early(rank: int, world: int, counts: Counts) -> tuple[str, int]:
    """What `join` raises where it is asked to, and how many values an epoch after it changes."""
    model, optimizer, session = _attached(rank, world, "bytescheduler")
    text = ""
    with session:
        try:
            _train(rank, model, model, optimizer, partial(session.join, throw_on_early_termination=True), [counts])
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
        session.flush()
        before = bits_of(model, optimizer)
        _train(rank, model, model, optimizer, session.join, [(3, 3)])
        session.flush()
        return text, len(differences(before, bits_of(model, optimizer)))


def refused(rank: int, world: int) -> list[str]:
    """Why `join` refuses a model whose buffers follow rank 0's, and a session that verifies."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    told = []
    for options in ({}, {"broadcast_buffers": False, "verify": True}):
        network = gradlane.Network.line(world, GIVEN.startup_ns, GIVEN.bytes_per_second)
        with gradlane.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "wfbp", network=network, **options) as session:
            try:
                with session.join():
                    told.append("")
            except GradlaneError as error:
                told.append(f"{type(error).__name__}: {error}")
    return told


def killed(rank: int, world: int, victim: int, backend: str) -> tuple[str, float]:
    """Rank `victim` kills itself in its third step, when the other has none left; what the other raises, and how soon."""
    model, optimizer, session = _attached(
        rank, world, "bytescheduler" if backend == "all-reduce" else "mercury", backend=backend
    )
    generator, began = torch.Generator().manual_seed(rank), time.monotonic()
    try:
        with session, session.join():
            for step in range(8 if rank == victim else 3):
                if step == 6:
                    os.kill(os.getpid(), signal.SIGKILL)
                x, y = model.batch(generator)
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                began = time.monotonic()
    except GradlaneError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "nothing", 0.0


def evaluated_meanwhile(rank: int, world: int) -> list[str]:
    """`no_sync` and an evaluation inside `join`: what differs from DDP's."""
    counts = (3, 5)

    def run(model: Mlp, call: Any, optimizer: torch.optim.Optimizer, no_sync: Any, joined: Any) -> dict[str, torch.Tensor]:
        generator, seen = torch.Generator().manual_seed(1000 + rank), {}
        with joined:
            for step in range(counts[rank] * 2):
                x, y = model.batch(generator)
                if step % 2 == 0:
                    optimizer.zero_grad()
                with no_sync() if step % 2 == 0 else contextlib.nullcontext():
                    torch.nn.functional.cross_entropy(call(x), y).backward()
                if step % 2:
                    optimizer.step()
                    with torch.no_grad():
                        seen[f"{step}"] = model(x).sum()
        return {**bits_of(model, optimizer), **seen}

    torch.manual_seed(7)
    model = Mlp()
    wrapped = DistributedDataParallel(model)
    reference = run(model, wrapped, momentum(model), wrapped.no_sync, wrapped.join())
    model, optimizer, session = _attached(rank, world, "bytescheduler")
    with session:
        found = run(model, model, optimizer, session.no_sync, session.join())
    return differences(reference, found)
