"""What ranks run over the own transport."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn import functional as F

import gradlane
from gradlane.errors import JobError
from gradlane.live.backends.external_servers import _PREFIX, _job_store
from tests.live.cases import bits_of
from tests.live.faults import census
from tests.live.loops import GIVEN, Mlp, momentum
from tests.processes import resident_bytes

POLICIES: dict[str, dict[str, Any]] = {
    "wfbp": {},
    "sync-easgd": {},
    "bytescheduler": {"partition_bytes": 1000, "credit_bytes": 3000},
    "geryon": {"slice_bytes": 512},
    "mercury": {},
}


def _step(model: Any, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    x, y = model.batch(generator)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def train_under_each(
    rank: int, world: int, only: str | None = None, summation_order: Any = None, servers: int = 0
) -> dict[str, dict[str, torch.Tensor]]:
    """The bits after 12 steps under each policy."""
    bits = {}
    for name, knobs in POLICIES.items():
        if only not in (None, name):
            continue
        torch.manual_seed(7)
        model = Mlp()
        optimizer = momentum(model)
        generator = torch.Generator().manual_seed(rank)
        options: dict[str, Any] = {"network": GIVEN, "timeout": 20, "summation_order": summation_order, "servers": servers}
        with gradlane.attach(model, optimizer, gradlane.policies.get(name, **knobs), backend="server", **options) as session:
            for _ in range(12):
                _step(model, optimizer, generator)
            session.flush()
            bits[name] = bits_of(model, optimizer)
    return bits


def train_until_it_fails(rank: int, world: int, servers: int, kill: int = 0) -> tuple[str, str, int | None]:
    """The error, its text and the rank that it blames, of a job whose rank 0 kills process `kill` after ten steps."""
    model = Mlp()
    optimizer = momentum(model)
    generator = torch.Generator().manual_seed(rank)
    try:
        with gradlane.attach(model, optimizer, "mercury", backend="server", servers=servers, network=GIVEN, timeout=20):
            for step in range(100_000):
                if rank == 0 and step == 10 and kill:
                    os.kill(kill, signal.SIGKILL)
                _step(model, optimizer, generator)
    except JobError as error:
        return type(error).__name__, str(error), getattr(error, "rank", None)
    return "", "", None


def lose_a_server_while_a_call_forms(rank: int, world: int, servers: int) -> tuple[str, str, bool]:
    """What attaching raises if a server is killed when it has taken its place, and whether the job's next call is served."""
    if rank == 0:
        _job_store(dist.distributed_c10d._get_default_store()).add(f"{_PREFIX}/places/0", 1)  # of which nothing more is heard
    dist.barrier()
    model = Mlp()
    optimizer = momentum(model)
    how: dict[str, Any] = {"backend": "server", "servers": servers, "network": GIVEN}
    said = ("", "")
    try:
        gradlane.attach(model, optimizer, "mercury", timeout=3, **how).close()
    except JobError as error:
        said = type(error).__name__, str(error)
    dist.barrier()
    with gradlane.attach(model, optimizer, "mercury", timeout=20, **how):
        _step(model, optimizer, torch.Generator().manual_seed(rank))
    return *said, True


def soak(rank: int, world: int, warm_up: int, iterations: int, shared: str) -> dict[str, Any]:
    """What a rank holds before and after `iterations` steps under mercury, and by how much it has grown.

    shared: GRADLANE_SHARED_MEMORY.
    """
    with patch.dict(os.environ, GRADLANE_SHARED_MEMORY=shared):
        return _soak(rank, warm_up, iterations)


def _soak(rank: int, warm_up: int, iterations: int) -> dict[str, Any]:
    model = Mlp()
    optimizer = momentum(model)
    generator = torch.Generator().manual_seed(rank)
    with gradlane.attach(model, optimizer, "mercury", backend="server", network=GIVEN, timeout=20) as session:
        for _ in range(warm_up):
            _step(model, optimizer, generator)
        before, resident = census(), resident_bytes()
        for _ in range(iterations):
            _step(model, optimizer, generator)
        session.flush()
        torch.distributed.barrier()  # the other rank has its sums too
        backend: Any = session._driver._backend
        stats = backend._node.stats()
        return {
            "before": before,
            "after": census(),
            "grown_bytes": resident_bytes() - resident,
            "held_bytes": stats["held_bytes"],
            "most_held_bytes": stats["most_held_bytes"],
            "announced_bytes": backend.most_held_bytes(session._driver._sums._buffers),
        }
