"""Run by each rank of a two-host lab: send to the other and receive from it at once, for argv[1] seconds.

Prints the bits per second received, from the first byte's arrival to the last one's.
"""

import os
import socket
import sys
import threading
import time

rank, seconds = int(os.environ["RANK"]), float(sys.argv[1])
address = os.environ["MASTER_ADDR"], 7000

if rank == 0:
    with socket.create_server(address) as server:
        connection = server.accept()[0]
else:
    deadline = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection(address, timeout=10)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
connection.settimeout(10)


def send() -> None:
    block, end = bytes(1 << 16), time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(block)
    connection.shutdown(socket.SHUT_WR)


sender = threading.Thread(target=send)
sender.start()
into = bytearray(1 << 18)
connection.recv_into(into)
first = last = time.monotonic()
received = 0
while count := connection.recv_into(into):
    received, last = received + count, time.monotonic()
sender.join()
print(round(received * 8 / (last - first)), flush=True)
