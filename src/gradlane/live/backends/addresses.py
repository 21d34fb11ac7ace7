"""Finds the address at which the other hosts of a job reach this one."""

from __future__ import annotations

import contextlib
import os
import socket

from gradlane.errors import CommunicationError, InputError


def own_address() -> str:
    """This host's address on the route to MASTER_ADDR, at which other ranks reach it too.

    Raises:
        InputError: MASTER_PORT is no port.
        CommunicationError: as `address_towards`.
    """
    port = os.environ.get("MASTER_PORT", "29500")
    if not (port.isdecimal() and int(port) < 2**16):
        raise InputError(f"MASTER_PORT: got {port!r}, expected an integer from 0 to 65535")
    return address_towards(os.environ.get("MASTER_ADDR", "localhost"), int(port))


def address_towards(host: str, port: int) -> str:
    """This host's source address for packets to `host`.

    Raises:
        CommunicationError: `host` does not resolve, or no route leads to it.
    """
    with contextlib.suppress(socket.gaierror):
        for family, _, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
                probe.connect(target)  # sends nothing: only chooses a route
                return str(probe.getsockname()[0])
    raise CommunicationError(f"{host!r} resolves to no address that this host has a route to")
