"""Formation: workers with a server each find one another through the job's store, and connect.

Knows no torch: the store is anything with torch's `set`, `get`, `wait` and `delete_key`, under a prefix of this
formation's own. What stands in a store is public to the network, so the secret is there for as long as it takes
to meet, and no longer.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from gradlane.errors import CommunicationError
from gradlane.transport.node import Node, NodeOptions


def form(store: Any, options: NodeOptions, address: str, timeout_s: float, local_packet_bytes: int | None = None) -> Node:
    """The joined node of worker `options.rank`, with server `options.rank` in it. Every rank calls it alike.

    address: of this host, as the others reach it; ranks that are all on one host meet on loopback instead, leave
    checksums out, since those bytes pass no network, and cut packets of `local_packet_bytes` if that is given.
    `options` need no secret, job or address of their own. Raises `CommunicationError` where someone does not come
    within `timeout_s`, and what the node raises.
    """
    rank, world = options.rank, options.world
    assert rank is not None, "a worker forms with a server in its process"
    deadline = time.monotonic() + timeout_s

    def read(key: str, whose: int) -> str:
        try:
            store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
            return bytes(store.get(key)).decode()
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {rank}: rank {whose} did not come to meet the others within {timeout_s:.0f} s ({error})"
            ) from None

    if rank == 0:
        store.set("secret", secrets.token_hex(32))
    store.set(f"host/{rank}", _host())
    secret = bytes.fromhex(read("secret", 0))
    is_local = len({read(f"host/{other}", other) for other in range(world)}) == 1
    node = Node(
        replace(
            options,
            servers=world,
            server=rank,
            job=int.from_bytes(hashlib.sha256(secret).digest()[:7], "little"),
            secret=secret,
            address="127.0.0.1" if is_local else address,
            checksum=options.checksum and not is_local,
            packet_bytes=local_packet_bytes if is_local and local_packet_bytes else options.packet_bytes,
        )
    )
    try:
        store.set(f"address/{rank}", f"{node.options.address} {node.port}")
        for other in range(world):
            if other != rank:
                theirs, port = read(f"address/{other}", other).split()
                node.dial(other, theirs, int(port))
        node.join(max(0.001, deadline - time.monotonic()))
    except BaseException:
        node.close()
        raise
    if rank == 0:  # all others are connected to it, and have read it
        store.delete_key("secret")
    return node


def _host() -> str:
    """The same for two processes if loopback leads from one to the other: one boot of one kernel, one network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
