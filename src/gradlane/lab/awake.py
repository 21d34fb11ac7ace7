"""Keeps processors awake while a lab runs, so that its clocks are on time.

A processor that a virtual machine leaves idle is given back to the host, and comes back when the host sees fit: timers of
0.1 ms were seen 2 ms late one time in ten on an idle machine, and 0.03 ms on one that was busy. Shaped links and emulated
devices both wait for timers; a link that is late by more than its burst loses the time. The kernel leaves off such sleep for
whoever asks that waking take no time (its PM QoS), and that is root.

Processes that spin at idle priority would need no root, and were tried: with them everything else stood still for 2 to 31 s now
and then (Linux 6.18).
"""

from __future__ import annotations

import os
import struct

LATENCY = "/dev/cpu_dma_latency"
"""What may pass, in microseconds, until a processor is awake: the least that anybody has written there and holds open."""


def stay() -> None:
    """Until this process and its forks have ended. Raises OSError where it may not."""
    asked = os.open(LATENCY, os.O_WRONLY | os.O_CLOEXEC)  # in force while it is open, which nobody ends but the kernel
    os.write(asked, struct.pack("i", 0))
