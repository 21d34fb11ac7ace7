"""Run by each rank of a two-host lab: rank 1 sends argv[1] numbered datagrams, one after another, waits argv[2] ms for each to
come back, and prints what it saw.

How many came back, and the shortest time that one took, in ns. Rank 0 sends back what it gets, until a connection that rank 1
holds has ended.
"""

import os
import select
import socket
import sys
import time

count, patience_ns = int(sys.argv[1]), int(sys.argv[2]) * 1_000_000
address = os.environ["MASTER_ADDR"], 7000
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.settimeout(10)

if os.environ["RANK"] == "0":
    datagrams.bind(address)
    with socket.create_server(address) as server:
        held = server.accept()[0]
    while True:
        readable, _, _ = select.select([datagrams, held], [], [], 30)
        if datagrams in readable:
            data, sender = datagrams.recvfrom(100)
            datagrams.sendto(data, sender)
        else:
            break
else:
    deadline = time.monotonic() + 20
    while True:
        try:
            held = socket.create_connection(address, timeout=20)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
    shortest, back = None, 0
    for number in range(count):
        began = time.monotonic_ns()
        datagrams.sendto(number.to_bytes(4, "little"), address)
        # what comes later than this counts as lost, and is not taken for an answer to another
        limit_ns = began + (1_000_000_000 if number == 0 else patience_ns)
        while (left_ns := limit_ns - time.monotonic_ns()) > 0 and select.select([datagrams], [], [], left_ns / 1e9)[0]:
            if datagrams.recv(100) == number.to_bytes(4, "little"):
                took = time.monotonic_ns() - began
                back, shortest = back + 1, min(shortest or took, took)
                break
    held.close()
    print(back, shortest, flush=True)
