"""Keeps the processors of a virtual machine awake while a lab runs, so that its clocks are on time.

A processor that a guest leaves idle is given back to the host, and comes back when the host sees fit: timers of 0.1 ms were
seen 2 ms late one time in ten on an idle machine, and 0.03 ms on one that was busy. Shaped links and emulated devices both
wait for timers; a link that is late by more than its burst loses the time. So there is something to do on each processor that
gives way to everything else (SCHED_IDLE).
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def sleepy() -> tuple[int, ...]:
    """The processors to keep awake: all that this process may use, on a virtual machine.

    None where the time of processors is rationed (a container's quota), since staying awake would use it up.
    """
    return tuple(sorted(os.sched_getaffinity(0))) if _is_virtual() and not _is_rationed() else ()


def stay(processor: int) -> None:
    """Be what `processor` does when it has nothing to do. Does not return."""
    os.sched_setaffinity(0, {processor})
    os.nice(19)  # for tools that tell such time apart
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


def _is_virtual() -> bool:
    with suppress(OSError):
        return any(
            "hypervisor" in line.split() for line in Path("/proc/cpuinfo").read_text().splitlines() if line[:5] == "flags"
        )
    return False


def _is_rationed() -> bool:
    quotas = {"/sys/fs/cgroup/cpu.max": "max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}
    for path, without in quotas.items():
        with suppress(OSError):
            if Path(path).read_text().split()[0] != without:
                return True
    return False
