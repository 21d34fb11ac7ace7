"""Where tests start processes: all are forked from one server, which has imported what is slow and started nothing.

Not from pytest's own process: a child would have its threads' locks, its sockets and its temporary files.
"""

from __future__ import annotations

import multiprocessing

AT_ONCE_S = 4.0
"""What a test takes as "at once": long for a machine that is not busy, and sooner than every limit whose passing would look the
same. How long things really take, `python -m bench.kills` and docs/faults.md say.
"""

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.live.loops", "torch._dynamo", "gradlane.transport"])
