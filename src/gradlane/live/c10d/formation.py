"""Formation: the ranks of one group find each other through its store and connect, each to the server in each other."""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from gradlane.errors import CommunicationError
from gradlane.live.c10d.options import Options
from gradlane.live.peers import own_address
from gradlane.transport import Node, NodeOptions

# on loopback a packet's price is the processor's, not the wire's
_LOCAL_PACKET_BYTES = 512 << 10
_PACKET_BYTES = 128 << 10


def form(store: Any, rank: int, world: int, timeout_s: float, options: Options) -> Node:
    """A joined node with a worker and a server in this process. Raises `CommunicationError`, or what the node raises.

    Ranks on one host meet on loopback; otherwise each listens on the address that leads to the job's master.
    """
    deadline = time.monotonic() + timeout_s

    def read(key: str) -> str:
        left_s = max(0.001, deadline - time.monotonic())
        try:
            store.wait([key], timedelta(seconds=left_s))
            return bytes(store.get(key)).decode()
        except RuntimeError as error:
            raise CommunicationError(f"rank {rank}: no {key!r} in the store within {timeout_s:.0f} s: {error}") from None

    store.set(f"host/{rank}", _host())
    if rank == 0:
        store.set("secret", secrets.token_hex(32))
    is_local = len({read(f"host/{other}") for other in range(world)}) == 1
    node = Node(
        NodeOptions(
            world=world,
            servers=world,
            rank=rank,
            server=rank,
            fingerprint=options.fingerprint(),
            secret=bytes.fromhex(read("secret")),
            address="127.0.0.1" if is_local else own_address(),
            packet_bytes=options.packet_bytes or (_LOCAL_PACKET_BYTES if is_local else _PACKET_BYTES),
            rank_order=options.rank_order,
            checksum=not is_local if options.checksum is None else options.checksum,
            deal_evenly=True,
        )
    )
    try:
        store.set(f"address/{rank}", f"{node.options.address} {node.port}")
        for other in range(world):
            if other != rank:
                address, port = read(f"address/{other}").split()
                node.dial(other, address, int(port))
        node.join(max(0.001, deadline - time.monotonic()))
    except BaseException:
        node.close()
        raise
    return node


def _host() -> str:
    """The same for two processes if loopback leads from one to the other: one boot of one kernel, one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
