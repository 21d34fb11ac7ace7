"""Run by both ranks of a two-host lab: how long a small urgent tensor takes while a large one is under way.

argv: "priority" or "fifo", the large tensor's bytes, the small one's, unsent_bytes, send_buffer_bytes. Rank 1 pushes to a
server on rank 0, which returns the sum of one. Rank 1 prints one JSON object: seconds of the small tensor alone
(`alone_s`), behind the large one (`urgent_s`, the median of five at several moments of it), and of the large one (`large_s`).
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time

import numpy as np

from gradlane.core.plan import Wire
from gradlane.transport import Node, NodeOptions

order, large_bytes, small_bytes, unsent_bytes, send_buffer_bytes = sys.argv[1], *map(int, sys.argv[2:])
PORT = 7100
SERVER_ADDRESS = os.environ["MASTER_ADDR"]
LIMIT_S = 60.0
TIMES = 5

is_worker = os.environ["RANK"] == "1"
options = NodeOptions(
    world=1,
    servers=1,
    rank=0 if is_worker else None,
    server=None if is_worker else 0,
    secret=b"lab",
    address=SERVER_ADDRESS,
    port=0 if is_worker else PORT,
    tell_tables=True,
    unsent_bytes=unsent_bytes,
    send_buffer_bytes=send_buffer_bytes,
)


def push_and_wait(node: Node, tensor: int) -> float:
    began = time.monotonic()
    node.push(tensor, notify=False)
    node.wait(tensor, LIMIT_S)
    return time.monotonic() - began


def until_the_server_is_there() -> socket.socket:
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            return socket.create_connection((SERVER_ADDRESS, PORT + 1), LIMIT_S)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise


if is_worker:
    with until_the_server_is_there(), Node(options) as node:
        node.dial(0, SERVER_ADDRESS, PORT)
        node.join(LIMIT_S)
        large, small = (np.ones(size // 4, np.float32) for size in (large_bytes, small_bytes))
        by_priority = order == "priority"
        wire: Wire = "packet-priority" if by_priority else "packet-fifo"
        node.define(0, large.ctypes.data, large.nbytes, "float32", wire=wire, priority=9)
        node.define(1, small.ctypes.data, small.nbytes, "float32", wire=wire, priority=0)
        for _ in range(3):
            alone_s = push_and_wait(node, 1)
        push_and_wait(node, 0)  # so that the connection has found its pace
        began = time.monotonic()
        node.push(0, notify=False)
        urgent = []
        for _ in range(TIMES if by_priority else 1):
            time.sleep(0.1)
            urgent.append(push_and_wait(node, 1))
        assert not (by_priority and node.is_done(0)), "the large tensor was over before the small ones"
        node.wait(0, LIMIT_S)
        large_s = time.monotonic() - began
    print(json.dumps({"alone_s": alone_s, "urgent_s": statistics.median(urgent), "worst_s": max(urgent), "large_s": large_s}))
else:
    with Node(options), socket.create_server((SERVER_ADDRESS, PORT + 1)) as door, door.accept()[0] as worker:
        worker.recv(1)  # comes when the worker has gone
