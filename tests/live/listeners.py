"""The sockets that this process listens on, as the kernel has them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gradlane
from gradlane.core.backends import BackendName

_LISTEN = "0A"


def listeners() -> set[tuple[str, int]]:
    """Addresses and ports."""
    own = {target[8:-1] for target in map(_target, Path("/proc/self/fd").iterdir()) if target.startswith("socket:[")}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTEN and inode in own:
                digits, port = local.split(":")
                words = bytes.fromhex(digits)
                address = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.add((socket.inet_ntop(family, address), int(port, 16)))
    return found


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""


def of_a_session(rank: int, world: int, backend: BackendName | None) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """What a rank listens on because of a session: while it trains, and once it is closed."""
    before = listeners()
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = gradlane.attach(model, optimizer, backend=backend)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
    session.flush()
    during = listeners() - before
    dist.barrier()
    session.close()
    dist.barrier()
    return during, listeners() - before
