"""What handing a message over costs: from the call in Python to its bytes being with the kernel, in microseconds.

    python -m bench.startup

A push on an idle connection writes its first bytes before it returns, so that the time of the call is the startup; the
call of a second message right behind it is the gap between two. `send` is the same bytes by a bare socket from Python,
`call` the crossing into the native module alone. A round trip goes to a server in another process, and back.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np

from gradlane.transport import Node, NodeOptions

REPEATS = 3000
SIZES = (256, 4096, 32 << 10)


def _serve(pipe: Connection) -> None:
    with Node(NodeOptions(world=1, servers=1, rank=None, server=0, tell_tables=True)) as node:
        pipe.send(node.port)
        node.join(20)
        node.await_goodbyes(600)


def _echo(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := connection.recv(1 << 20):
        connection.sendall(data)


def _row(what: str, times: list[int]) -> None:
    tenths = statistics.quantiles(times, n=10)
    print(f"{what:>44} {statistics.median(times) / 1e3:9.2f} {tenths[0] / 1e3:9.2f} {tenths[-1] / 1e3:9.2f}", flush=True)


def main() -> None:
    print(f"\nstartup on loopback, {REPEATS} times each\n{'microseconds':>44} {'median':>9} {'p10':>9} {'p90':>9}")
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    clock = time.perf_counter_ns
    with Node(NodeOptions(world=1, servers=1, rank=0, server=None, tell_tables=True)) as node:
        node.dial(0, "127.0.0.1", here.recv())
        node.join(20)
        data = [np.zeros(size // 4, np.float32) for size in SIZES for _ in range(2)]
        for tensor, each in enumerate(data):
            node.define(tensor, each.ctypes.data, each.nbytes, "float32")
        calls = []
        for _ in range(REPEATS):
            began = clock()
            node.is_done(0)
            calls.append(clock() - began)
        _row("call", calls)
        for place, size in enumerate(SIZES):
            first, second = 2 * place, 2 * place + 1
            startup, gap, trip = [], [], []
            for _ in range(REPEATS):
                began = clock()
                node.push(first, notify=False)
                middle = clock()
                node.push(second, notify=False)
                end = clock()
                node.wait(first, 20)
                node.wait(second, 20)
                alone = clock()
                node.push(first, notify=False)
                node.wait(first, 20)
                startup.append(middle - began)
                gap.append(end - middle)
                trip.append(clock() - alone)
            _row(f"push of {size} B, idle connection", startup)
            _row("a second one right behind it", gap)
            _row("push and wait: a round trip", trip)
    process.join(20)
    for size in SIZES:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            echo = multiprocessing.Process(target=_echo, args=(listener,), daemon=True)
            echo.start()
            with socket.create_connection(listener.getsockname()) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                bare = bytes(size + 40)
                sends, trips = [], []
                for _ in range(REPEATS):
                    began = clock()
                    connection.sendall(bare)
                    sends.append(clock() - began)
                    left = len(bare)
                    while left:
                        left -= len(connection.recv(left))
                    trips.append(clock() - began)
            echo.join(20)
        _row(f"send of {size + 40} B by a bare socket", sends)
        _row("send and recv: a round trip", trips)


if __name__ == "__main__":
    main()
