"""Run by each of three hosts: two servers answer one worker at the same time, and meet on its link (Geryon Fig. 5).

argv: bytes of each tensor, how often. Rank 0 is the worker, rank 1 the server of the urgent tensor, whose packets are marked
EF both ways, rank 2 that of the other, unmarked. The worker prints one JSON list: for each time the nanoseconds from
handing over both until it had the urgent sum, and until it had the other.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch.distributed as dist

from gradlane.transport import Node, NodeOptions, WireLane
from gradlane.transport.formation import form

LIMIT_S = 60.0
EF = WireLane(dscp=46, socket_priority=6)


def main(size_bytes: int, times: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    address = f"10.77.0.{rank + 1}"

    def join(server: int, lane: WireLane) -> Node:
        options = NodeOptions(
            world=1, servers=1, rank=0 if rank == 0 else None, server=None if rank == 0 else 0, tell_tables=True, lanes=(lane,)
        )
        return form(dist.distributed_c10d.PrefixStore(f"server/{server}", store), options, address, LIMIT_S)

    if rank > 0:
        with join(rank, EF if rank == 1 else WireLane()) as node:
            while not node.await_goodbyes(LIMIT_S):
                pass
        return
    sums = [np.ones(size_bytes // 4, np.float32) for _ in range(2)]
    with join(1, EF) as urgent, join(2, WireLane()) as late:
        for node, data in zip((urgent, late), sums, strict=True):
            node.define(0, data.ctypes.data, data.nbytes, "float32")
        found = []
        for _ in range(times + 1):
            began = time.monotonic_ns()
            late.push(0, notify=False)
            urgent.push(0, notify=False)
            urgent.wait(0, LIMIT_S)
            arrived = time.monotonic_ns() - began
            late.wait(0, LIMIT_S)
            found.append((arrived, time.monotonic_ns() - began))
    print(json.dumps(found[1:]), flush=True)  # by the first the connections have found their pace


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
