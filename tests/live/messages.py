"""What each rank does in the tests of messages between two ranks."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import gradlane.live.c10d as c10d
from gradlane.errors import BarrierError, GradlaneError
from tests.live.collectives import group

SIZES = (0, 1, 1000, 65_536, 65_537, 300_000, 2_000_000)


def _bytes(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def all_pairs(rank: int, world: int, early: bool, shared: bool) -> bool:
    """Every rank sends every other messages of all sizes with two tags; they are received in the other order of tags."""
    over = group(shared_memory=shared)
    sends = [
        dist.isend(_bytes(size, 100 * rank + 10 * other + tag), other, over, tag)
        for other in range(world)
        for tag in (0, 7)
        for size in SIZES
        if other != rank
    ]
    if early:
        dist.barrier(over)  # what is small is there before its receive
    intos, works = [], []
    for other in range(world):
        for tag in (7, 0):
            for size in SIZES:
                if other != rank:
                    intos.append((torch.zeros(size, dtype=torch.uint8), _bytes(size, 100 * other + 10 * rank + tag)))
                    works.append(dist.irecv(intos[-1][0], other, over, tag))
    for work in (*works, *sends):
        work.wait()
    return all(torch.equal(got, expected) for got, expected in intos)


def batched(rank: int, world: int) -> list[float]:
    """What the other ranks have sent in one batch with what this rank sends."""
    over, others = group(), [other for other in range(world) if other != rank]
    intos = [torch.zeros(3) for _ in others]
    calls = [dist.P2POp(dist.irecv, into, other, over) for into, other in zip(intos, others, strict=True)]
    calls += [dist.P2POp(dist.isend, torch.full((3,), rank + 1.0), other, over) for other in others]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return [into.sum().item() for into in intos]


def any_source(rank: int, world: int) -> list[int]:
    """Rank 0 receives from whoever has sent; the ranks that it heard of, which the values confirm."""
    over = group()
    if rank != 0:
        for tag, size in enumerate((3, 400_000)):
            dist.send(torch.full((size,), float(rank)), 0, over, tag)
        return []
    heard = []
    for tag, size in enumerate((3, 400_000)):
        for _ in range(1, world):
            into = torch.zeros(size)
            source = dist.recv(into, group=over, tag=tag)
            assert (into == source).all()
            heard.append(source)
    return heard


def odd_tensors(rank: int, world: int) -> list[float]:
    """A strided tensor is sent and received as its elements; complex and integer ones travel as well, and views whose
    memory has other values than they have.
    """
    over = group()
    if rank == 0:
        dist.send(torch.arange(12.0).view(3, 4).t(), 1, over)
        dist.send(torch.tensor([1 + 2j]), 1, over)
        over.send([torch.tensor([1 + 2j]).conj()], 1).wait()  # torch's own function refuses it
        dist.send(torch._neg_view(torch.tensor([7.0])), 1, over)
        dist.send(torch.tensor([8.0]), 1, over)
    elif rank == 1:
        wide = torch.zeros(4, 6)
        dist.recv(wide[:, ::2], 0, over)
        pair = torch.zeros(1, dtype=torch.complex64)
        dist.recv(pair, 0, over)
        mirrored, of_view, minus = torch.zeros(1, dtype=torch.complex64), torch.zeros(1), torch.zeros(1)
        dist.recv(mirrored, 0, over)
        dist.recv(of_view, 0, over)
        dist.recv(torch._neg_view(minus), 0, over)
        parts = [each.item() for it in (pair[0], mirrored[0]) for each in (it.real, it.imag)]
        return [*wide[1].tolist(), *parts, *of_view.tolist(), *minus.tolist()]
    return []


def flood(rank: int, world: int) -> tuple[int, bool]:
    """Rank 0 sends far more than may wait at rank 1; what rank 1 held at most, and whether a sum went by meanwhile."""
    over = group()
    count, size = 300, 60_000
    data = [torch.full((size,), each % 251, dtype=torch.uint8) for each in range(count)]
    sends = [dist.isend(each, 1, over) for each in data] if rank == 0 else []
    token = torch.ones(1)
    dist.all_reduce(token, group=over)
    right = token.item() == world
    if rank == 1:
        for each in range(count):
            into = torch.zeros(size, dtype=torch.uint8)
            dist.recv(into, 0, over)
            right = right and bool((into == each % 251).all())
    for send in sends:
        send.wait()
    return len(over._mail._under_way), right


def refused(rank: int, world: int) -> list[str]:
    over = group()
    errors = []
    for call in (
        lambda: over.send([torch.ones(1)], rank, 0),
        lambda: over.send([torch.ones(1)], world, 0),
        lambda: over.send([torch.ones(1)], (rank + 1) % world, -1),
        lambda: over.recv([torch.ones(1), torch.ones(1)], (rank + 1) % world, 0),
        lambda: over.recv([torch.ones(1, device="meta")], (rank + 1) % world, 0),
    ):
        try:
            call()
        except GradlaneError as error:
            errors.append(type(error).__name__)
    dist.barrier(over)
    return errors


def fails(rank: int, world: int, what: str) -> tuple[str, float]:
    """The error of a message that cannot end well, and the seconds until it came."""
    over = dist.new_group(backend="gradlane", timeout=timedelta(seconds=30))
    began = time.monotonic()
    try:
        dist.barrier(over)  # a rank that is late may hear here already that the group has failed
        began = time.monotonic()
        if what == "died":
            if rank == 1:
                os._exit(7)
            dist.recv(torch.zeros(5), 1, over)
        elif what == "left":
            if rank == 1:
                over.shutdown()
                time.sleep(4)
            elif rank == 0:
                dist.recv(torch.zeros(5), 1, over)
        elif what == "late":
            if rank == 0:
                over.recv([torch.zeros(5)], 1, 0).wait(timedelta(seconds=0.3))
            else:
                dist.recv(torch.zeros(5), 0, over)
        elif rank < 2:  # "size", "large size"
            size = 100 if what == "size" else 300_000
            if rank == 0:
                dist.send(torch.zeros(size), 1, over)
                dist.recv(torch.zeros(1), 1, over)
            else:
                dist.recv(torch.zeros(size + 1), 0, over)
        else:
            dist.recv(torch.zeros(1), 0, over)
    except GradlaneError as error:
        return type(error).__name__, time.monotonic() - began
    finally:
        over.shutdown()
    return "", time.monotonic() - began


def barriers(rank: int, world: int) -> tuple[str, Any]:
    """All come, then all but the last; what is raised, and the ranks that it names."""
    over = dist.new_group(backend="gradlane")
    for wait_all in (False, True):
        c10d.monitored_barrier(over, 20, wait_all)
    try:
        if rank != world - 1:
            c10d.monitored_barrier(over, timedelta(seconds=0.5), True)
        dist.barrier()
    except BarrierError as error:
        dist.barrier()
        return type(error).__name__, error.ranks
    finally:
        over.shutdown()
    return "", ()


def sparse(rank: int, world: int) -> list[list[float]]:
    """The sum of sparse tensors with different numbers of entries, of which one rank has none."""
    over = group()
    places = torch.tensor([[0, rank, rank]]) if rank else torch.zeros((1, 0), dtype=torch.int64)
    given = torch.sparse_coo_tensor(places, torch.ones(places.shape[1], 2), (4, 2))
    work = dist.all_reduce(given, group=over, async_op=True)
    work.wait()
    return given.to_dense().tolist()


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 7))


def ddp(rank: int, world: int, backend: str, what: str) -> list[bytes]:
    """The bits of a model trained by DDP with uneven inputs, or with PowerSGD's hook."""
    over = dist.group.WORLD if backend == "gloo" else group()
    replica = nn.parallel.DistributedDataParallel(_model(), process_group=over)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    steps = 4
    if what == "powersgd":
        state = powerSGD_hook.PowerSGDState(over, matrix_approximation_rank=2, start_powerSGD_iter=2)
        replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        steps += 2 * rank
    inputs = [torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * rank + each)) for each in range(steps)]

    def train() -> None:
        for given in inputs:
            optimizer.zero_grad()
            replica(given).square().mean().backward()
            optimizer.step()

    if what == "join":
        with replica.join():
            train()
    else:
        train()
    return [parameter.detach().numpy().tobytes() for parameter in replica.parameters()]


def profiled(rank: int, world: int) -> dict[str, int]:
    """What torch's profiler has of gradlane in a step of DDP and a message."""
    over = group()
    replica = nn.parallel.DistributedDataParallel(_model(), process_group=over)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        replica(torch.ones(2, 40)).sum().backward()
        if rank == 0:
            dist.send(torch.ones(3), 1, over)
        elif rank == 1:
            dist.recv(torch.ones(3), 0, over)
    return {event.key: event.count for event in profiler.key_averages() if event.key.startswith("gradlane:")}
