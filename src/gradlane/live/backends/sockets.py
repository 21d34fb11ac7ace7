"""Sockets: finds the TCP connections of a Gloo process group and gives them a traffic class.

torch.distributed does not hand out its sockets. A group opens them while it is made, so they are
among the file descriptors that this process has gained. Each has its other end in another rank,
which tells it from every other socket. This cannot find connections that a group opens later
(Gloo's lazy mode), nor links that are not sockets of this process (RDMA, NCCL).
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
"""File descriptors, each with the kernel's name of its socket, such as "socket:[1234]"; a number
may be used again.
"""


def open_sockets() -> Sockets:
    """The sockets of this process; none where there is no /proc."""
    found = []
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        # the listing's own descriptor, or one that was closed since
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found.append((int(name), target))
    return frozenset(found)


def set_traffic_class(group: Any, candidates: Sockets, traffic_class: TrafficClass) -> None:
    """Give the connections of `group` a traffic class (collective).

    Ranks exchange digests of their candidates' addresses; a connection of the group is one that two
    ranks name.

    Args:
        group: a process group over Gloo.
        candidates: the sockets that this process has gained while `group` was made.
        traffic_class: DSCP and SO_PRIORITY of what the group sends from now on.

    Raises:
        UnsupportedError: a rank does not find a connection to each other rank; raised on all ranks.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    still_open = candidates & open_sockets()
    ends = {fd: pair for fd, _ in still_open if (pair := ends_of(fd)) is not None}
    most = torch.tensor([len(ends)], dtype=torch.int64, device="cpu")
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    mine = torch.zeros(world, int(most), dtype=torch.int64, device="cpu")
    mine[rank, : len(ends)] = torch.tensor(
        [_digest(remote, local) for local, remote in ends.values()], dtype=torch.int64, device="cpu"
    )
    dist.all_reduce(mine, group=group)
    theirs = set(mine.flatten().tolist())
    found = [fd for fd, (local, remote) in ends.items() if _digest(local, remote) in theirs]
    fewest = torch.tensor([len(found)], dtype=torch.int64, device="cpu")
    dist.all_reduce(fewest, op=dist.ReduceOp.MIN, group=group)
    if int(fewest) < world - 1:
        raise UnsupportedError(
            f"the plan's lanes ask for classes in the network, and a rank finds {int(fewest)} of the {world - 1} TCP "
            "connections of a process group of torch.distributed, expected all of them; use backend='server', whose "
            "connections are gradlane's own"
        )
    for fd in found:
        with socket.socket(fileno=os.dup(fd)) as one:
            put_mark(one, traffic_class)


def ends_of(fd: int) -> tuple[str, str] | None:
    """The (local, remote) addresses of a TCP connection, as text; None for any other socket."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
        if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
            return str(one.getsockname()[:2]), str(one.getpeername()[:2])
    return None


def shut_down(fd: int) -> None:
    """End a TCP connection, so that whoever waits on it, on either side, is told. Anything else is left alone: Gloo aborts
    the process if its listening socket is shut down.
    """
    if ends_of(fd) is not None:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
            one.shutdown(socket.SHUT_RDWR)


def _digest(from_end: str, to_end: str) -> int:
    return int.from_bytes(sha256(f"{from_end} {to_end}".encode()).digest()[:8], "little", signed=True)
