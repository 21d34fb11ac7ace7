"""Run by each rank of a three-host lab: ranks 1 and 2 send to rank 0, whose link down they share.

argv: bytes per second of rank 1, its type of service, seconds. Rank 1 sends at its rate, alone and then beside rank 2, which
sends unmarked and as fast as it can. Rank 0 prints one JSON object: bits per second that arrived of rank 1 `alone` and
`beside`, and of the `other` in that time; and how many it received of each in all.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

rank = int(os.environ["RANK"])
bytes_per_second, type_of_service, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
address = os.environ["MASTER_ADDR"], 7000
LIMIT_S = 30
SO_MAX_PACING_RATE = 47
WARM_S = 0.5  # until a flow has found its rate

if rank == 0:
    received = {1: 0, 2: 0}
    began = threading.Event()

    def receive(connection: socket.socket) -> None:
        sender = connection.recv(1)[0]
        into = bytearray(1 << 18)
        while count := connection.recv_into(into):
            received[sender] += count

    def rates_over(span_s: float) -> dict[int, float]:
        before, at = dict(received), time.monotonic()
        time.sleep(span_s)
        took = time.monotonic() - at
        return {sender: (received[sender] - before[sender]) * 8 / took for sender in received}

    with socket.create_server(address) as server:
        connections = [server.accept()[0] for _ in range(2)]
        threads = [threading.Thread(target=receive, args=(connection,)) for connection in connections]
        for thread in threads:
            thread.start()
        for connection in connections:
            connection.sendall(b"!")
        time.sleep(WARM_S)
        alone = rates_over(seconds)
        time.sleep(2 * WARM_S)
        beside = rates_over(seconds)
        for thread in threads:
            thread.join(LIMIT_S)
    print(json.dumps({"alone": alone[1], "beside": beside[1], "other": beside[2]}), flush=True)
else:
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            connection = socket.create_connection(address, timeout=LIMIT_S)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
    if rank == 1:
        connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, type_of_service)
        connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_second)
    connection.sendall(bytes([rank]))
    connection.recv(1)
    end = time.monotonic() + 2 * seconds + 3.5 * WARM_S
    if rank == 2:
        time.sleep(seconds + 1.5 * WARM_S)
    block = bytes(1 << 16)
    while time.monotonic() < end:
        connection.send(block)
