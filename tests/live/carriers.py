"""What ranks run that attach without a backend: both carriers, or all-reduce where the own ports cannot be reached."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from msgspec import UNSET

import gradlane
from gradlane.core import files
from gradlane.errors import JobError
from gradlane.live.backends.carriers import Carriers
from gradlane.live.startup.attach import _leave_files
from gradlane.live.startup.options import FolderOptions
from gradlane.transport import Node
from tests.live.auto import AtRandom, put
from tests.live.cases import bits_of, differences
from tests.live.loops import log_lines
from tests.live.tuned import parts, step, under_ddp


@contextlib.contextmanager
def nobody_answers(silently: bool) -> Iterator[str]:
    """This rank dials a port on which nobody accepts connections, in place of the other ranks' servers.

    silently: what is sent there is dropped, as by a firewall: a queue of connections that nobody takes is full.
    """
    dial = Node.dial
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(socket.socket())
        bound.bind(("127.0.0.1", 0))
        address = bound.getsockname()
        if silently:
            bound.listen(0)
            for _ in range(4):
                caller = stack.enter_context(socket.socket())
                caller.setblocking(False)
                caller.connect_ex(address)
        stack.enter_context(patch.object(Node, "dial", lambda self, server, there, port: dial(self, server, there, address[1])))
        yield f"127.0.0.1:{address[1]}"


def sockets() -> int:
    links = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(os.readlink(each))
    return sum(link.startswith("socket:") for link in links)


def more_sockets_than(before: int) -> int:
    """Sockets beyond `before` that stay; threads of torch.distributed may hold those of a closed group for a moment."""
    deadline = time.monotonic() + 10
    while (more := sockets() - before) > 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    return more


def falls_back(rank: int, world: int, lost: int, silently: bool, steps: int) -> dict[str, Any]:
    """Rank `lost` cannot reach the servers of the others; what is left of them, and what differs from DDP."""
    under_ddp(rank, 1)  # opens what torch keeps open
    named(rank, world, "all-reduce")
    model, optimizer, generator = parts(rank)
    losses: list[float] = []
    before = sockets()
    began = time.monotonic()
    with log_lines() as lines, nobody_answers(silently) if rank == lost else contextlib.nullcontext() as dialled:
        session = gradlane.attach(model, optimizer, timeout=30)
        took_s = time.monotonic() - began
    with session:
        threads = [thread.name for thread in threading.enumerate() if thread.name == "gradlane-servers"]
        for _ in range(steps):
            losses.append(step(model, model.batch, optimizer, generator))
        session.flush()
        bits, plan = bits_of(model, optimizer), session.plan
        carrier = type(session._parts.backend).__name__
    gc.collect()  # frames of the exceptions that were raised may refer to groups
    more = more_sockets_than(before)
    reference = under_ddp(rank, len(losses))
    return {
        "differs": differences(reference.bits, bits),
        "losses": losses == reference.losses,
        "backend": plan.backend is UNSET,
        "carrier": carrier,
        "threads": threads,
        "took_s": took_s,
        "dialled": dialled,
        "lines": lines,
        "more_sockets": more,
    }


def named(rank: int, world: int, backend: Any) -> tuple[str, str]:
    """What carries a session whose backend is named, and what its plan names."""
    model, optimizer, generator = parts(rank)
    with gradlane.attach(model, optimizer, backend=backend, timeout=20) as session:
        for _ in range(8):
            step(model, model.batch, optimizer, generator)
        return type(session._parts.backend).__name__, str(session.plan.backend)


def networks_left(rank: int, world: int, folder: str) -> tuple[str, str]:
    """The kinds of networks that a session leaves while servers carry its plan: with its timeline, and with its profile."""
    model, optimizer, generator = parts(rank)
    folders = FolderOptions(Path(folder, f"timeline-{rank}"), Path(folder, f"profile-{rank}"))
    with gradlane.attach(model, optimizer, timeout=20, profile_iterations=1) as session:
        put(session, turns := AtRandom(rank, ("mercury",), 10**6))
        turns.settled = True
        for _ in range(200):
            step(model, model.batch, optimizer, generator)
            if session.plan.backend == "server":
                break
        _leave_files(folders, 0, session)
        left = [files.read_where(each / "network.json") for each in (folders.timeline, folders.profile) if each is not None]
    return type(left[0]).__name__, type(left[1]).__name__


def the_idle_node_fails(rank: int, world: int) -> tuple[str, list[str], float]:
    """Rank 1's node is ended while all-reduce carries, and later a plan is for servers; what is raised, and when."""
    model, optimizer, generator = parts(rank)
    carriers: list[str] = []
    session = gradlane.attach(model, optimizer, timeout=20, profile_iterations=1)
    put(session, turns := AtRandom(rank, ("mercury",), 10**6))
    turns.settled = True
    began = time.monotonic()
    try:
        assert isinstance(session._parts.backend, Carriers)
        if rank == 1:
            session._parts.backend._servers._node.abort("ended by the test")
        for _ in range(1000):
            carriers.append(str(session.plan.backend))
            step(model, model.batch, optimizer, generator)
    except JobError as error:
        return f"{type(error).__name__}: {error}", carriers, time.monotonic() - began
    finally:
        session.close()
    return "", carriers, time.monotonic() - began


def what_is_left(rank: int, world: int, times: int) -> tuple[int, int, int]:
    """Sockets and threads more than before after sessions with both carriers, and resident threads of ours."""

    def once() -> None:
        model, optimizer, generator = parts(rank)
        with gradlane.attach(model, optimizer, timeout=20) as session:
            for _ in range(4):
                step(model, model.batch, optimizer, generator)
            session.flush()
            dist.barrier()

    others = set(threading.enumerate())  # of what other tests have left on these ranks
    once()
    before, threads = sockets(), len(os.listdir("/proc/self/task"))
    for _ in range(times):
        once()
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("gradlane") and thread not in others]
    for thread in ours:  # some have done their work and are about to end
        thread.join(10)
    staying = sum(thread.is_alive() for thread in ours)
    return more_sockets_than(before), len(list(Path("/proc/self/task").iterdir())) - threads, staying
