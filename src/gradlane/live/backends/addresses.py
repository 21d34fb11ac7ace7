"""Finds the address at which the other hosts of a job reach this one.

An interface that is named wins: by GRADLANE_INTERFACE (which `gradlane launch --interface` sets), GLOO_SOCKET_IFNAME or
NCCL_SOCKET_IFNAME. Otherwise it is this host's address on the route to MASTER_ADDR. On the host of the store that may be
loopback, as where /etc/hosts gives a host's own name to 127.0.1.1. So each rank also says how it reaches the store
(`store_address`): that is the address of the store's host for ranks on other hosts.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from gradlane.errors import CommunicationError, InputError

INTERFACE_VARIABLE = "GRADLANE_INTERFACE"
_VARIABLES = (INTERFACE_VARIABLE, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915


def own_address(environment: Mapping[str, str] = os.environ) -> str:
    """The address of the interface that is named, or this host's address on the route to MASTER_ADDR.

    Raises:
        InputError: MASTER_PORT is no port, or no interface of that name has an address.
        CommunicationError: as `route`.
    """
    return named_address(environment) or route(*_master(environment))[0]


def store_address(environment: Mapping[str, str] = os.environ) -> str:
    """The address at which this process reaches MASTER_ADDR. Raises as `own_address`."""
    return route(*_master(environment))[1]


def _master(environment: Mapping[str, str]) -> tuple[str, int]:
    port = environment.get("MASTER_PORT", "29500")
    if not (port.isdecimal() and int(port) < 2**16):
        raise InputError(f"MASTER_PORT: got {port!r}, expected an integer from 0 to 65535")
    return environment.get("MASTER_ADDR", "localhost"), int(port)


def route(host: str, port: int) -> tuple[str, str]:
    """The source and the target address of packets to `host`.

    Raises:
        CommunicationError: `host` does not resolve, or no route leads to it.
    """
    with contextlib.suppress(socket.gaierror):
        for family, _, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
                probe.connect(target)  # sends nothing: only chooses a route
                return str(probe.getsockname()[0]), str(probe.getpeername()[0])
    raise CommunicationError(f"{host!r} resolves to no address that this host has a route to")


# -- interfaces --------------------------------------------------------------------------------------------------


def named_address(environment: Mapping[str, str] = os.environ) -> str | None:
    """The address of the interface that a variable names; None if none does.

    GLOO_SOCKET_IFNAME and GRADLANE_INTERFACE are names, the first of a list that has an address counts. Of
    NCCL_SOCKET_IFNAME each is the beginning of a name, or after "=" the name; one that only leaves interfaces out ("^")
    names none.
    """
    variable = next((each for each in _VARIABLES if environment.get(each)), None)
    if variable is None or environment[variable].startswith("^"):
        return None
    wanted = environment[variable]
    is_prefix = variable == "NCCL_SOCKET_IFNAME" and not wanted.startswith("=")
    interfaces = [name for _, name in socket.if_nameindex()]
    for each in wanted.removeprefix("=").split(","):
        for name in interfaces:
            if (name.startswith(each) if is_prefix else name == each) and (address := _address_of(name)) is not None:
                return address
    usable = ", ".join(name for name in interfaces if _address_of(name) is not None) or "none"
    raise InputError(f"{variable}: got {wanted!r}, expected an interface of this host that has an address: {usable}")


def _address_of(interface: str) -> str | None:
    """The IPv4 address of an interface, else a global IPv6 one; None if it has neither."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope == "00":
                return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return None
