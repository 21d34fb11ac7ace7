"""Where tests start processes: all are forked from one server, which has imported what is slow and started nothing.

Not from pytest's own process: a child would have its threads' locks, its sockets and its temporary files.
"""

from __future__ import annotations

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.live.loops", "torch._dynamo", "gradlane.transport"])
