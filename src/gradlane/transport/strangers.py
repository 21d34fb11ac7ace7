"""Which connection goes where too many have not said who they are. `native/node/node_peers.cc` has the same rule."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Hashable, Sequence

MAX_STRANGERS = 64  # connections that have not been let in


def origin_of(address: str) -> Hashable:
    """Where a peer comes from, as far as it cannot choose freely: its IPv4 address, or its IPv6 network (/64).

    Args:
        address: of the peer, as sockets give it; any other text is an origin of its own.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    return ip.ipv4_mapped or int(ip) >> 64


def is_out_of_descriptors(error: OSError) -> bool:
    """Whether `error` says that the process, or the host, can open nothing more."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


class Reserve:
    """One descriptor that is kept back: with it a caller can be hung up on when no other is free.

    Otherwise a selector tells of that caller again and again, and its thread turns without a pause.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = os.open(os.devnull, os.O_RDONLY)

    def hang_up(self, listener: socket.socket) -> bool:
        """Take one caller off the queue of `listener`, which has one, and hang up.

        Returns:
            Whether that was possible. It is not while somebody else has taken the descriptor too.
        """
        self.close()
        try:
            listener.accept()[0].close()
            self._descriptor = os.open(os.devnull, os.O_RDONLY)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Give the descriptor back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def who_makes_room(origins: Sequence[Hashable], newcomer: Hashable, places: int = MAX_STRANGERS) -> int | None:
    """The stranger that goes before another one is let in.

    Of the origin with most strangers, the newcomer counted, the oldest goes. So an attacker of one address drives out
    itself first. A peer with the same address has as long as it takes to fill all places again. What strangers have
    said is no reason: the hello of an honest one may be on its way, and a byte costs an attacker nothing.

    Args:
        origins: of the strangers, the oldest first.
        newcomer: its origin.
        places: how many strangers there may be.

    Returns:
        An index into `origins`; None if there is room.
    """
    if len(origins) < places:
        return None
    count = Counter([*origins, newcomer])
    most = max(count[origin] for origin in origins)
    return next(index for index, origin in enumerate(origins) if count[origin] == most)
