"""Formation: the processes of a job find one another through the job's store, and connect.

The store is anything with torch's `set`, `get`, `wait` and `delete_key`; this module does not
import torch. Everything in a store is public to the network, so the job's secret is put there once
all members have come, and deleted once all have read it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from gradlane.errors import CommunicationError
from gradlane.transport.node import Node, NodeOptions

# Every kernel has it, and every process may choose it. A host's default may be BBR, whose pacing
# leaves the processors idle between packets where nothing can be congested.
_LOCAL_CONGESTION = "reno"


def form(
    store: Any,
    options: NodeOptions,
    address: str,
    timeout_s: float,
    local_packet_bytes: int | None = None,
    store_address: str = "",
) -> Node:
    """Form the job's data plane; all members call it with matching arguments.

    Members on one host connect over loopback, without checksums, as those bytes cross no network,
    and with a congestion control that does not pace.

    Args:
        store: the job's store, under a prefix for this formation.
        options: whether this process is a worker, a server or both; its secret, job, address,
            `is_local` and `hosts` are filled in. With `tell_tables` the servers are members of their own; otherwise server i
            runs in worker i's process.
        address: of this host, as others reach it.
        timeout_s: how long to wait for all members.
        local_packet_bytes: packet size if all members are on one host; None: as in `options`.
        store_address: at which this process reaches the store. Where `address` of a member is loopback and members are
            on several hosts, it takes this of a member on another host: the store is on its own.

    Returns:
        This process's joined node.

    Raises:
        CommunicationError: a member did not come within `timeout_s`.
        JobError: what the node raises.
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
            why = "" if "timeout" in str(error) else f" ({error})"  # torch's text names keys of the store
            does = "; is it started, with gradlane server HOST:PORT?" if of.startswith("server") else ""
            raise CommunicationError(
                f"{me}: {of} did not come to meet the others within {timeout_s:.0f} s{why}{does}{options.numbering}"
            ) from None

    first = workers[0]
    store.set(f"store/{me}", store_address)
    store.set(f"host/{me}", host_name())
    names = [read("host", member) for member in members]
    is_local = len(set(names)) == 1
    if not is_local and is_loopback(address):
        others = (member for member, name in zip(members, names, strict=True) if name != host_name())
        reached = (theirs for member in others if (theirs := read("store", member)) and not is_loopback(theirs))
        address = next(reached, address)
    if me == first:
        store.set(f"secret/{first}", secrets.token_hex(32))
    secret = bytes.fromhex(read("secret", first))
    node = Node(
        replace(
            options,
            job=int.from_bytes(hashlib.sha256(secret).digest()[:7], "little"),
            secret=secret,
            greeting_s=left_s(),
            is_local=is_local,
            hosts=tuple(map(names.index, names[: options.world])),
            address="127.0.0.1" if is_local else address,
            checksum=options.checksum and not is_local,
            congestion=options.congestion or (_LOCAL_CONGESTION if is_local else ""),
            packet_bytes=local_packet_bytes if is_local and local_packet_bytes else options.packet_bytes,
        )
    )
    try:
        # also tells the others that this member has read the secret
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


def is_loopback(address: str) -> bool:
    """Whether no other host reaches `address`; False for what is no address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def host_name() -> str:
    """A string that is equal for processes that reach each other over loopback."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
