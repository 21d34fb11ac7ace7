"""Changes of links' rates while ranks run, in a process forked by the lab's init."""

from __future__ import annotations

import socket
import time
from typing import Any

from gradlane.lab import kernel
from gradlane.lab.links.shaping import change, open_routes
from gradlane.lab.links.wires import Wires, port_name
from gradlane.lab.processes import INTERFACE
from gradlane.lab.spec import LabSpec


def follow(spec: LabSpec, wires: Wires, began_ns: int) -> None:
    """Set each rate at its time, counted from `began_ns`; return after the last."""
    steps = [
        (change.at_ns, host, is_up, change.bytes_per_second)
        for host in range(spec.hosts)
        for is_up, link in zip((True, False), spec.links(host), strict=True)
        for change in (() if link is None else link.steps)
    ]
    ends: dict[tuple[int, bool], tuple[Any, int]] = {}
    for _, host, is_up, _ in steps:
        if (host, is_up) not in ends:
            kernel.setns(wires.namespace_fds[host] if is_up else wires.switch_fd, kernel.CLONE_NEWNET)
            ends[host, is_up] = open_routes(), socket.if_nametoindex(INTERFACE if is_up else port_name(host))
    for at_ns, host, is_up, rate in sorted(steps):
        time.sleep(max(0, began_ns + at_ns - time.monotonic_ns()) / 1e9)
        where, index = ends[host, is_up]
        change(where, index, rate, spec, f"{'up' if is_up else 'down'} link of host{host}", is_host=is_up)
