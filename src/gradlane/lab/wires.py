"""The network of a lab: one namespace a host, a bridge in the caller's namespace, shaped veth pairs between.

Called once by the lab's init, a process of one thread that is root in its own user and network namespaces; that
network namespace becomes the switch. The kernel removes all of this with the last process in it, so nothing here
removes anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gradlane.errors import LabError
from gradlane.lab import kernel
from gradlane.lab.kernel import refused
from gradlane.lab.spec import INTERFACE, LabSpec

PREFERRED_CONGESTION_CONTROL = "cubic"

_HTB, _HTB_CLASS, _LEAF = 0x1_0000, 0x1_0001, 0x2_0000
_ETHERNET_HEADER_BYTES = 14
_LEAST_QUEUE_PACKETS = 32
# What HTB lets go at once, as a time at the link's rate. A smaller one follows the rate more closely and costs more
# wake-ups; 0.5 ms is 62 kB at 1 Gbit/s, about the largest packet that TCP hands down.
_BURST_SECONDS = 0.000_5
_MOST_SEGMENTS = 44  # the largest packet that TCP hands down: 64 kB of 1448-byte segments
_LINK_UP_SECONDS = 5.0


class Wires(NamedTuple):
    """A network namespace for each host, held open, and the congestion control that its connections use."""

    namespace_fds: tuple[int, ...]
    congestion_control: str


def string_up(spec: LabSpec) -> Wires:
    """Build the whole network of `spec` from within the namespace that is to be its switch."""
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

    switch_fd = _open_own_namespace()
    with pyroute2.IPRoute() as switch:
        bridge = _add_bridge(switch)
        namespace_fds, congestion = [], []
        for host, address in enumerate(spec.addresses):
            kernel.unshare(kernel.CLONE_NEWNET)
            namespace_fds.append(_open_own_namespace())
            _set_sysctls()
            with pyroute2.IPRoute() as inside:
                _add_link(inside, switch, switch_fd, bridge, host, spec)
                congestion.append(_give_address(inside, address))
            kernel.setns(switch_fd, kernel.CLONE_NEWNET)
        _await_links(switch, spec.hosts)
    os.close(switch_fd)
    # one kernel serves all hosts, so that they all agree
    return Wires(tuple(namespace_fds), congestion[0])


def _open_own_namespace() -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def _step(what: str) -> Iterator[None]:
    """Turn what pyroute2 raises into a `LabError` that says which operation was refused."""
    try:
        yield
    except LabError:
        raise
    except Exception as error:
        code = getattr(error, "code", None) or getattr(error, "errno", None)
        if isinstance(code, int) and code:
            raise refused(what, code, "see whether its module is there and loaded") from error
        raise LabError(f"{what} failed: {error!r}; {kernel.WHAT_STILL_WORKS}") from error


def _add_bridge(switch: Any) -> int:
    with _step("a bridge (RTM_NEWLINK, kind bridge)"):
        switch.link("add", ifname="switch", kind="bridge", br_forward_delay=0, br_stp_state=0, br_mcast_snooping=0)
        index: int = switch.link_lookup(ifname="switch")[0]
        switch.link("set", index=index, state="up")
    return index


def _set_sysctls() -> None:
    """Comforts of the current network namespace. Where /proc/sys is read-only they stay as they are."""
    for name, value in (
        # no router and neighbour noise on a link whose traffic is counted
        ("net/ipv6/conf/default/disable_ipv6", "1"),
        # a connection shall not start from what an earlier run on the same link has learned
        ("net/ipv4/tcp_no_metrics_save", "1"),
    ):
        try:
            Path("/proc/sys", name).write_text(value)
        except OSError:
            continue


def _add_link(inside: Any, switch: Any, switch_fd: int, bridge: int, host: int, spec: LabSpec) -> None:
    port_name = f"host{host}"
    # Smaller packets than a burst, so that shaping stays even and another connection's packet can come in between.
    # Each end limits what is sent from it; the switch hands packets on as they came.
    limits: dict[str, int] = {"mtu": spec.mtu_bytes}
    rate = None if spec.link_bits_per_second is None else spec.link_bits_per_second // 8
    if rate is not None:
        limits["gso_max_segs"] = min(max(int(rate * _BURST_SECONDS) // spec.mtu_bytes, 2), _MOST_SEGMENTS)
    with _step(f"the link of {port_name} (RTM_NEWLINK, kind veth)"):
        inside.link(
            "add", ifname=INTERFACE, kind="veth", peer={"ifname": port_name, "net_ns_fd": switch_fd, **limits}, **limits
        )
        end = inside.link_lookup(ifname=INTERFACE)[0]
        port = switch.link_lookup(ifname=port_name)[0]
    if rate is not None:
        _shape(inside, end, rate, spec, f"{INTERFACE} of {port_name}")
        _shape(switch, port, rate, spec, f"the switch's port to {port_name}")
    with _step(f"connecting {port_name} to the bridge (RTM_SETLINK)"):
        switch.link("set", index=port, master=bridge)
        switch.link("set", index=port, state="up")
        inside.link("set", index=end, state="up")
        inside.link("set", index=inside.link_lookup(ifname="lo")[0], state="up")


def _shape(where: Any, index: int, bytes_per_second: int, spec: LabSpec, name: str) -> None:
    largest = spec.mtu_bytes + _ETHERNET_HEADER_BYTES
    burst = max(int(bytes_per_second * _BURST_SECONDS), 2 * largest)
    queue = max(bytes_per_second * spec.queue_ns // 10**9, _LEAST_QUEUE_PACKETS * largest)
    with _step(f"a queueing discipline on {name} (RTM_NEWQDISC, kind htb)"):
        where.tc("add", "htb", index, _HTB, default=_HTB_CLASS & 0xFFFF)
    with _step(f"a shaped class on {name} (RTM_NEWTCLASS, kind htb)"):
        # quantum only divides between classes, of which there is one; unset, the kernel warns about its default
        shape = {"rate": bytes_per_second, "burst": burst, "cburst": burst, "quantum": largest, "mtu": largest}
        where.tc("add-class", "htb", index, _HTB_CLASS, parent=_HTB, **shape)
    with _step(f"a bounded queue on {name} (RTM_NEWQDISC, kind bfifo)"):
        where.tc("add", "bfifo", index, _LEAF, parent=_HTB_CLASS, limit=queue)


def _give_address(inside: Any, address: str) -> str:
    """Give the host its address and its route; returns the congestion control of its connections.

    The kernel lets only unrestricted algorithms be the default of a namespace that is not the first one
    (net.ipv4.tcp_allowed_congestion_control), but a route may name any that is loaded.
    """
    index = inside.link_lookup(ifname=INTERFACE)[0]
    with _step(f"the address {address} (RTM_NEWADDR)"):
        # noprefixroute: the route below is the only one
        inside.addr("add", index=index, address=address, prefixlen=24, flags=0x200)
    route = {"dst": f"{address.rpartition('.')[0]}.0/24", "oif": index, "scope": "link", "prefsrc": address}
    try:
        inside.route("add", **route, metrics={"cc_algo": PREFERRED_CONGESTION_CONTROL})
    except Exception:
        with _step("the route of the lab's network (RTM_NEWROUTE)"):
            inside.route("add", **route)
    # read back, so that what is recorded is what is in force
    with _step("listing a host's routes (RTM_GETROUTE)"):
        for found in inside.get_routes(oif=index):
            metrics = found.get_attr("RTA_METRICS")
            named = metrics and metrics.get_attr("RTAX_CC_ALGO")
            if named:
                return str(named)
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def _await_links(switch: Any, hosts: int) -> None:
    """Return when every port carries traffic: what is sent before that is lost, and TCP repeats it after 1 s only."""
    deadline = time.monotonic() + _LINK_UP_SECONDS
    while True:
        with _step("listing the switch's ports (RTM_GETLINK)"):
            ports = [link for link in switch.get_links() if str(link.get_attr("IFLA_IFNAME")).startswith("host")]
        up = sum(port.get_attr("IFLA_OPERSTATE") == "UP" for port in ports)
        if up == hosts:
            return
        if time.monotonic() > deadline:
            raise LabError(
                f"of the {hosts} links of the lab {up} came up within {_LINK_UP_SECONDS:.0f} s; {kernel.WHAT_STILL_WORKS}"
            )
