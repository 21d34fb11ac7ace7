"""Shaping of one direction of a link: HTB limits its rate, bounded queues behind it drop what does
not fit.

    root htb -- class 1:1 (the link's rate) -- bfifo                      first-in-first-out
    root htb -- class 1:1 (the link's rate) -+- class 1:10 prio 0 -- bfifo  by class: u32 filters
    look at the DSCP
                                             +- class 1:11 prio 1 -- bfifo

A class has next to no rate of its own and borrows the link's. HTB lends to the most urgent class
first, which makes the order strict. In this module `where` is a pyroute2.IPRoute of the namespace
that has the interface `index`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gradlane.errors import LabError
from gradlane.lab import kernel
from gradlane.lab.kernel import refused
from gradlane.lab.spec import LabSpec, class_of

_HTB, _LINK_CLASS, _LEAF = 0x1_0000, 0x1_0001, 0x2_0000
_FIRST_CLASS = 0x1_0010
_IPV4 = 0x0800
_ETHERNET_HEADER_BYTES = 14
_LEAST_QUEUE_PACKETS = 32
# Linux's default for a network card (txqueuelen). A host's TCP keeps this queue short by itself
# (TCP small queues). If the host's own queue drops a packet, a connection with nothing else in
# flight waits 0.2 s before it sends again.
_HOST_QUEUE_PACKETS = 1000
# HTB's burst, as a time at the link's rate. A smaller one follows the rate more closely and costs
# more wake-ups; 0.5 ms is 62 kB at 1 Gbit/s, about the largest packet that TCP hands down.
_BURST_SECONDS = 0.000_5
_MOST_SEGMENTS = 44  # the largest packet that TCP hands down: 64 kB of 1448-byte segments
_OWN_RATE = 1_000  # bytes per second that a class has before it borrows; HTB requires some


def open_routes() -> Any:
    """A pyroute2.IPRoute that stays in the caller's current network namespace."""
    try:
        import pyroute2
        from pyroute2.netlink.rtnl import tcmsg
        from pyroute2.netlink.rtnl.tcmsg import sched_pfifo
    except ImportError as error:
        raise LabError(
            f"a lab needs pyroute2, which cannot be imported ({error}); install it with: pip install 'gradlane[lab]'"
        ) from error
    # pyroute2 knows pfifo and not bfifo; their options are the same struct tc_fifo_qopt
    tcmsg.plugins.setdefault("bfifo", sched_pfifo)
    return pyroute2.IPRoute()


@contextmanager
def step(what: str) -> Iterator[None]:
    """Turn pyroute2's exceptions into a `LabError` that names the operation `what`."""
    try:
        yield
    except LabError:
        raise
    except Exception as error:
        code = getattr(error, "code", None) or getattr(error, "errno", None)
        if isinstance(code, int) and code:
            raise refused(what, code, "see whether its module is there and loaded") from error
        raise LabError(f"{what} failed: {error!r}; {kernel.WHAT_STILL_WORKS}") from error


def most_segments(bytes_per_second: int, mtu_bytes: int) -> int:
    """The largest packet for a link of this rate, in segments of `mtu_bytes`.

    It is smaller than a burst, so that shaping stays even and other connections' packets come in
    between.
    """
    return min(max(int(bytes_per_second * _BURST_SECONDS) // mtu_bytes, 2), _MOST_SEGMENTS)


def shape(where: Any, index: int, bytes_per_second: int, spec: LabSpec, name: str, *, is_host: bool = False) -> None:
    """Shape an interface; `is_host`: it is the host's end of a link, not the switch's."""
    with step(f"a queueing discipline on {name} (RTM_NEWQDISC, kind htb)"):
        unmarked = _LINK_CLASS if spec.network_classes == 1 else _FIRST_CLASS + spec.network_classes - 1
        where.tc("add", "htb", index, _HTB, default=unmarked & 0xFFFF)
    _set("add", where, index, bytes_per_second, spec, name, is_host)
    for precedence in range(1, 8):
        place = class_of(precedence, spec.network_classes)
        if place < spec.network_classes - 1:
            with step(f"a filter on DSCP on {name} (RTM_NEWTFILTER, kind u32)"):
                # the type of service is the second byte of the IP header; its first three bits are
                # the precedence
                keys = [f"0x{precedence << 5:04x}/0x00e0+0"]
                to = {"parent": _HTB, "protocol": _IPV4, "target": _FIRST_CLASS + place}
                where.tc("add-filter", "u32", index, prio=precedence, keys=keys, **to)


def change(where: Any, index: int, bytes_per_second: int, spec: LabSpec, name: str, *, is_host: bool) -> None:
    """Change a shaped interface's rate and queue lengths; queued packets stay."""
    _set("change", where, index, bytes_per_second, spec, name, is_host)


def _set(how: str, where: Any, index: int, bytes_per_second: int, spec: LabSpec, name: str, is_host: bool) -> None:
    largest = spec.mtu_bytes + _ETHERNET_HEADER_BYTES
    burst = max(int(bytes_per_second * _BURST_SECONDS), 2 * largest)
    least = _HOST_QUEUE_PACKETS if is_host else _LEAST_QUEUE_PACKETS
    queue = max(bytes_per_second * spec.queue_ns // 10**9, least * largest)
    # no two classes have one priority, so quantum has no effect; if unset, the kernel warns about
    # its default
    common = {"cburst": burst, "quantum": largest, "mtu": largest}
    with step(f"a shaped class on {name} (RTM_NEWTCLASS, kind htb)"):
        where.tc(f"{how}-class", "htb", index, _LINK_CLASS, parent=_HTB, rate=bytes_per_second, burst=burst, **common)
    leaves = [_LINK_CLASS]
    if spec.network_classes > 1:
        leaves = [_FIRST_CLASS + place for place in range(spec.network_classes)]
        for place, leaf in enumerate(leaves):
            own = {"rate": _OWN_RATE, "ceil": bytes_per_second, "burst": largest, "prio": place}
            with step(f"a priority class on {name} (RTM_NEWTCLASS, kind htb)"):
                where.tc(f"{how}-class", "htb", index, leaf, parent=_LINK_CLASS, **own, **common)
    for place, leaf in enumerate(leaves):
        with step(f"a bounded queue on {name} (RTM_NEWQDISC, kind bfifo)"):
            where.tc(how, "bfifo", index, _LEAF + (place << 16), parent=leaf, limit=queue)
