"""Formation: the processes of a job find one another through the job's store, and connect.

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
    """The joined node of this process, which `options` say is a worker, a server, or both. All members call it alike.

    With `options.tell_tables` the servers are members of their own, else each is in the process of the worker of its
    number. address: of this host, as the others reach it; members that are all on one host meet on loopback instead,
    leave checksums out, since those bytes pass no network, and cut packets of `local_packet_bytes` if that is given.
    `options` need no secret, job or address of their own. Raises `CommunicationError` where someone does not come
    within `timeout_s`, and what the node raises.
    """
    workers = [f"rank {rank}" for rank in range(options.world)]
    servers = [f"server {server}" for server in range(options.servers)] if options.tell_tables else workers[: options.servers]
    members = workers + (servers if options.tell_tables else [])
    me = f"rank {options.rank}" if options.rank is not None else f"server {options.server}"
    deadline = time.monotonic() + timeout_s

    def left_s() -> float:
        return max(0.001, deadline - time.monotonic())

    def read(key: str, of: str) -> str:
        try:
            store.wait([f"{key}/{of}"], timedelta(seconds=left_s()))
            return bytes(store.get(f"{key}/{of}")).decode()
        except RuntimeError as error:
            raise CommunicationError(f"{me}: {of} did not come to meet the others within {timeout_s:.0f} s ({error})") from None

    first = workers[0]
    if me == first:
        store.set(f"secret/{first}", secrets.token_hex(32))
    store.set(f"host/{me}", _host())
    secret = bytes.fromhex(read("secret", first))
    is_local = len({read("host", member) for member in members}) == 1
    node = Node(
        replace(
            options,
            job=int.from_bytes(hashlib.sha256(secret).digest()[:7], "little"),
            secret=secret,
            address="127.0.0.1" if is_local else address,
            checksum=options.checksum and not is_local,
            packet_bytes=local_packet_bytes if is_local and local_packet_bytes else options.packet_bytes,
        )
    )
    try:
        # also says that this member has read the secret
        store.set(f"address/{me}", f"{node.options.address} {node.port}")
        for index, server in enumerate(servers):
            if options.rank is not None and index != options.server:
                theirs, port = read("address", server).split()
                node.dial(index, theirs, int(port))
        node.join(left_s())
        if me == first:
            for member in members:
                read("address", member)
            store.delete_key(f"secret/{first}")
    except BaseException:
        node.close()
        raise
    return node


def _host() -> str:
    """The same for two processes if loopback leads from one to the other: one boot of one kernel, one network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
