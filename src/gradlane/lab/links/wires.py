"""The network of a lab: a namespace for each host, a bridge as the switch, shaped veth pairs
between.

The lab's init, a process of one thread that is root in its own user and network namespaces, calls
this once; its network namespace becomes the switch. The kernel removes everything with the last
process in it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from gradlane.core.cluster import Link
from gradlane.errors import LabError
from gradlane.lab import kernel
from gradlane.lab.links.relay import Relayed, open_end
from gradlane.lab.links.shaping import most_segments, open_routes, shape, step
from gradlane.lab.processes import INTERFACE
from gradlane.lab.spec import LabSpec

PREFERRED_CONGESTION_CONTROL = "cubic"

_LINK_UP_SECONDS = 5.0


class Wires(NamedTuple):
    """The network as built.

    Attributes:
        namespace_fds: the hosts' network namespaces, held open.
        congestion_control: of the hosts' connections.
        switch_fd: the switch's network namespace.
        relayed: links that carry nothing until `relay` runs.
    """

    namespace_fds: tuple[int, ...]
    congestion_control: str
    switch_fd: int
    relayed: list[Relayed]


def port_name(host: int) -> str:
    """The interface at the switch's end of a host's link."""
    return f"host{host}"


def string_up(spec: LabSpec) -> Wires:
    """Build the network of `spec`; the current namespace becomes its switch."""
    switch_fd = _open_own_namespace()
    _set_sysctls()
    with open_routes() as switch:
        bridge = _add_bridge(switch)
        namespace_fds, congestion, relayed = [], [], []
        for host, address in enumerate(spec.addresses):
            kernel.unshare(kernel.CLONE_NEWNET)
            namespace_fds.append(_open_own_namespace())
            _set_sysctls()
            with open_routes() as inside:
                _add_link(inside, switch, switch_fd, bridge, host, spec)
                congestion.append(_give_address(inside, address))
            kernel.setns(switch_fd, kernel.CLONE_NEWNET)
            if any(spec.delay_and_loss(host)):
                relayed.append(_relayed(switch, host, spec))
        _await_links(switch, spec.hosts)
    # all hosts have one kernel, so they have the same algorithm
    return Wires(tuple(namespace_fds), congestion[0], switch_fd, relayed)


def _open_own_namespace() -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _add_bridge(switch: Any) -> int:
    with step("a bridge (RTM_NEWLINK, kind bridge)"):
        switch.link("add", ifname="switch", kind="bridge", br_forward_delay=0, br_stp_state=0, br_mcast_snooping=0)
        index: int = switch.link_lookup(ifname="switch")[0]
        switch.link("set", index=index, state="up")
    return index


def _set_sysctls() -> None:
    """Set options of the current network namespace, unless /proc/sys is read-only."""
    for name, value in (
        # no router and neighbour messages on links whose traffic is counted
        ("net/ipv6/conf/default/disable_ipv6", "1"),
        # connections do not start from metrics of earlier connections
        ("net/ipv4/tcp_no_metrics_save", "1"),
    ):
        try:
            Path("/proc/sys", name).write_text(value)
        except OSError:
            continue


def _add_link(inside: Any, switch: Any, switch_fd: int, bridge: int, host: int, spec: LabSpec) -> None:
    port_at_switch = port_name(host)
    # each end shapes what it sends; the switch forwards packets unchanged
    up, down = spec.links(host)
    is_relayed = any(spec.delay_and_loss(host))
    with step(f"the link of {port_at_switch} (RTM_NEWLINK, kind veth)"):
        port_limits, peer_name = _limits(down, spec, host), port_at_switch
        if is_relayed:
            near, far = _ends(host)
            switch.link("add", ifname=port_at_switch, kind="veth", peer={"ifname": far, "mtu": spec.mtu_bytes}, **port_limits)
            port_limits, peer_name = {"mtu": spec.mtu_bytes}, near
        peer = {"ifname": peer_name, "net_ns_fd": switch_fd, **port_limits}
        inside.link("add", ifname=INTERFACE, kind="veth", peer=peer, **_limits(up, spec, host))
        end = inside.link_lookup(ifname=INTERFACE)[0]
        port = switch.link_lookup(ifname=port_at_switch)[0]
    if up is not None:
        shape(inside, end, up.at(0)[0], spec, f"{INTERFACE} of {port_at_switch}", is_host=True)
    if down is not None:
        shape(switch, port, down.at(0)[0], spec, f"the switch's port to {port_at_switch}")
    with step(f"connecting {port_at_switch} to the bridge (RTM_SETLINK)"):
        switch.link("set", index=port, master=bridge)
        switch.link("set", index=port, state="up")
        inside.link("set", index=end, state="up")
        inside.link("set", index=inside.link_lookup(ifname="lo")[0], state="up")


def _ends(host: int) -> tuple[str, str]:
    """The relay's interfaces of a link, both at the switch: facing the host, and facing its port."""
    return f"near{host}", f"far{host}"


def _relayed(switch: Any, host: int, spec: LabSpec) -> Relayed:
    ends = _ends(host)
    with step(f"the ends of the relay to {port_name(host)} (RTM_SETLINK)"):
        for name in ends:
            switch.link("set", index=switch.link_lookup(ifname=name)[0], state="up")
    near, far = (open_end(name) for name in ends)
    return Relayed(near, far, *spec.delay_and_loss(host))


def _limits(link: Link | None, spec: LabSpec, host: int) -> dict[str, int]:
    limits = {"mtu": spec.mtu_bytes}
    if spec.delay_and_loss(host)[1]:
        limits["gso_max_segs"] = 1  # packets are lost one by one
    elif link is not None:
        # a connection keeps the limit it first saw, so the slowest rate decides
        slowest = min(link.bytes_per_second, *(change.bytes_per_second for change in link.steps), link.bytes_per_second)
        limits["gso_max_segs"] = most_segments(slowest, spec.mtu_bytes)
    return limits


def _give_address(inside: Any, address: str) -> str:
    """Give a host its address and route; returns the congestion control of its connections.

    Only unrestricted algorithms may be the default of a namespace other than the first
    (net.ipv4.tcp_allowed_congestion_control), but a route may name any that is loaded.
    """
    index = inside.link_lookup(ifname=INTERFACE)[0]
    with step(f"the address {address} (RTM_NEWADDR)"):
        # noprefixroute: the route below is the only one
        inside.addr("add", index=index, address=address, prefixlen=24, flags=0x200)
    route = {"dst": f"{address.rpartition('.')[0]}.0/24", "oif": index, "scope": "link", "prefsrc": address}
    try:
        inside.route("add", **route, metrics={"cc_algo": PREFERRED_CONGESTION_CONTROL})
    except Exception:
        with step("the route of the lab's network (RTM_NEWROUTE)"):
            inside.route("add", **route)
    # read back what is in force, for the record
    with step("listing a host's routes (RTM_GETROUTE)"):
        for found in inside.get_routes(oif=index):
            metrics = found.get_attr("RTA_METRICS")
            named = metrics and metrics.get_attr("RTAX_CC_ALGO")
            if named:
                return str(named)
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def _await_links(switch: Any, hosts: int) -> None:
    """Return when every port carries traffic. What is sent before is lost, and TCP resends it only
    after 1 s.
    """
    deadline = time.monotonic() + _LINK_UP_SECONDS
    while True:
        with step("listing the switch's ports (RTM_GETLINK)"):
            ports = [link for link in switch.get_links() if str(link.get_attr("IFLA_IFNAME")).startswith(port_name(0)[:-1])]
        up = sum(port.get_attr("IFLA_OPERSTATE") == "UP" for port in ports)
        if up == hosts:
            return
        if time.monotonic() > deadline:
            raise LabError(
                f"of the {hosts} links of the lab {up} came up within {_LINK_UP_SECONDS:.0f} s; {kernel.WHAT_STILL_WORKS}"
            )
