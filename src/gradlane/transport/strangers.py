"""Which connection goes where too many have not said who they are. `native/node/node_peers.cc` has the same rule."""

from __future__ import annotations

import ipaddress
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
