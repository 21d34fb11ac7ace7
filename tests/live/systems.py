"""What ranks run to show a system's own traits in a live job."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
from torch.nn import functional as F

import gradlane
from gradlane.core.checks import check_timeline
from gradlane.core.timeline import Timeline
from gradlane.errors import JobError, UnsupportedError
from gradlane.live.backends import all_reduce, sockets
from tests.live.loops import GIVEN, Mlp, momentum
from tests.live.networks import slow_network


def _attached(policy: Any, **options: Any) -> tuple[Any, Mlp, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = Mlp()
    optimizer = momentum(model)
    return gradlane.attach(model, optimizer, policy, network=GIVEN, timeout=20, **options), model, optimizer


def _train(model: Mlp, optimizer: torch.optim.Optimizer, steps: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x, y = model.batch(generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def halves(rank: int, world: int, **options: Any) -> list[dict[str, list[int]]]:
    """For each iteration under dear the messages in the order in which first and second halves ended, checked by rule 5."""
    policy = gradlane.policies.get("dear", fusion_bytes=12_000)
    with slow_network():
        session, model, optimizer = _attached(policy, **options)
    with session:
        _train(model, optimizer, 9, rank)
        timeline, plan = session.timeline(), session.plan
    check_timeline(timeline, plan)
    found = []
    for iteration in sorted({span.iteration for span in timeline.of("receive")}):
        sends, receives = (_of(timeline, kind, iteration) for kind in ("send", "receive"))
        assert max(span.end_ns for span in sends) <= min(span.start_ns for span in receives)
        found.append({"send": [s.subject for s in sends], "receive": [s.subject for s in receives]})
    return found


def _of(timeline: Timeline, kind: Any, iteration: int) -> list[Any]:
    return [span for span in timeline.of(kind) if span.iteration == iteration]


def marks_of_groups(rank: int, world: int) -> tuple[list[list[tuple[int, int]]], list[tuple[int, int]]]:
    """(TOS, SO_PRIORITY) of marked connections under geryon, by the lane with whose group they were opened; of all others."""
    session, model, optimizer = _attached(gradlane.policies.get("geryon", slice_bytes=4000))
    with session:
        _train(model, optimizer, 6, rank)
        backend = session._parts.backend
        assert isinstance(backend, all_reduce.AllReduceBackend)
        # other threads of torch.distributed may open connections meanwhile
        opened = [backend._groups.sockets(group) for group in range(len(backend._groups))]
        of_groups = [[mark for mark in _marks(group) if mark != (0, 0)] for group in opened]
        return of_groups, _marks(sockets.open_sockets().difference(*opened))


def _marks(some: sockets.Sockets) -> list[tuple[int, int]]:
    found = []
    for fd, _ in some:
        if sockets.ends_of(fd) is not None:
            with socket.socket(fileno=os.dup(fd)) as one:
                tos = one.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)
                found.append((tos, one.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY)))
    return found


def geryon_without_its_sockets(rank: int, world: int) -> str:
    """What is raised where rank 1 finds none of its connections."""
    session, model, optimizer = _attached("geryon")
    if rank == 1:
        session._parts.backend._groups._sockets[0] = frozenset()  # type: ignore[attr-defined]
    try:
        with session:
            _train(model, optimizer, 6, rank)
    except (UnsupportedError, JobError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
