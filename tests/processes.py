"""Where tests start processes, and what a process has: all are forked from one server, which has imported what is slow and
started nothing.

Not from pytest's own process: a child would have its threads' locks, its sockets and its temporary files.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

AT_ONCE_S = 4.0
"""What a test takes as "at once": long for a machine that is not busy, and sooner than every limit whose passing would look the
same. How long things really take, `python -m bench.kills` and docs/faults.md say.
"""

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.live.loops", "torch._dynamo", "gradlane.transport"])


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    """How many files, sockets and the like this process has open."""
    return len(os.listdir("/proc/self/fd"))
