"""Marking: the TCP connections of a process group of torch.distributed over Gloo, found and marked.

torch.distributed hands out no sockets. Those of a group are opened while it is made, so that they are among this
process's new file descriptors; and each has its other end among another rank's, so that nothing else is taken for one.
What cannot be had this way: connections that a group opens later (Gloo can be told to be lazy), and carriers that are no
sockets of this process (RDMA, NCCL).
"""

from __future__ import annotations

import contextlib
import os
import socket
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist

from gradlane.core.traffic_class import TrafficClass
from gradlane.errors import UnsupportedError
from gradlane.transport.path import put_mark

Sockets = frozenset[tuple[int, str]]
"""File descriptors, each with the identity of the socket behind it."""


def open_sockets() -> Sockets:
    """The sockets of this process."""
    found = []
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # the listing's own descriptor, or one that was closed since
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found.append((int(name), target))
    return frozenset(found)


def mark_group(group: Any, candidates: Sockets, mark: TrafficClass) -> None:
    """Mark the connections of `group` that are among `candidates` (collective: every rank of the group calls it).

    Raises `UnsupportedError`, on all ranks alike, where one of them does not find a connection to each of the others.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    still_open = candidates & open_sockets()
    ends = {fd: pair for fd, _ in still_open if (pair := ends_of(fd)) is not None}
    most = torch.tensor([len(ends)], dtype=torch.int64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    mine = torch.zeros(world, int(most), dtype=torch.int64)
    mine[rank, : len(ends)] = torch.tensor([_digest(remote, local) for local, remote in ends.values()], dtype=torch.int64)
    dist.all_reduce(mine, group=group)
    theirs = set(mine.flatten().tolist())
    found = [fd for fd, (local, remote) in ends.items() if _digest(local, remote) in theirs]
    fewest = torch.tensor([len(found)], dtype=torch.int64)
    dist.all_reduce(fewest, op=dist.ReduceOp.MIN, group=group)
    if int(fewest) < world - 1:
        raise UnsupportedError(
            f"the plan's lanes ask for classes in the network, and a rank finds {int(fewest)} of the {world - 1} TCP "
            "connections of a process group of torch.distributed, expected all of them; use backend='server', whose "
            "connections are gradlane's own"
        )
    for fd in found:
        with socket.socket(fileno=os.dup(fd)) as one:
            put_mark(one, mark)


def ends_of(fd: int) -> tuple[str, str] | None:
    """The (local, remote) addresses of a connection over TCP; None for any other socket."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
        if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
            return str(one.getsockname()[:2]), str(one.getpeername()[:2])
    return None


def _digest(from_end: str, to_end: str) -> int:
    return int.from_bytes(sha256(f"{from_end} {to_end}".encode()).digest()[:8], "little", signed=True)
