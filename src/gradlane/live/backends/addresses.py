"""The address under which the other hosts of a job reach this one."""

from __future__ import annotations

import contextlib
import os
import socket

from gradlane.errors import CommunicationError


def own_address() -> str:
    """The address of this host on the way to the job's master, which the other ranks can reach too."""
    return address_towards(os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "29500")))


def address_towards(host: str, port: int) -> str:
    """The address of this host on the way to `host`. Raises `CommunicationError` where there is no way."""
    with contextlib.suppress(socket.gaierror):
        for family, _, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
                probe.connect(target)  # sends nothing: only chooses a route
                return str(probe.getsockname()[0])
    raise CommunicationError(f"{host!r} resolves to no address that this host has a route to")
