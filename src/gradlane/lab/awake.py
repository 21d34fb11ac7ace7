"""Keeps processors awake while a lab runs, so that timers fire on time.

A virtual machine gives an idle processor back to its host. On an idle machine one timer of 0.1 ms
in ten fired 2 ms late, on a busy one 0.03 ms. Shaped links and emulated devices both wait for
timers; a link that is late by more than its burst loses that time. A process may ask the kernel for
a wake-up time of 0 (PM QoS), which needs root.

Processes that spin at idle priority would need no root, but with them everything else stopped for 2
to 31 s now and then (Linux 6.18).
"""

from __future__ import annotations

import os
import struct

LATENCY = "/dev/cpu_dma_latency"
"""The longest wake-up time in us; the least value of all processes that hold the file open is in
force.
"""


def stay() -> None:
    """Keep processors awake until this process and its forks have ended.

    Raises:
        OSError: the process may not ask for that.
    """
    asked = os.open(LATENCY, os.O_WRONLY | os.O_CLOEXEC)  # in force while it is open; only the kernel closes it
    os.write(asked, struct.pack("i", 0))
