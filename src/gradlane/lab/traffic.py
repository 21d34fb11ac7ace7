"""`python -m gradlane.lab.traffic receive|send ...`: the ends of a flow of other traffic. Only a
lab starts it.

The kernel paces the sender (SO_MAX_PACING_RATE), so a slow flow costs no processor time; the
receiver discards.
"""

from __future__ import annotations

import socket
import sys
import time

_SO_MAX_PACING_RATE = 47
_BLOCK = bytes(1 << 16)
_PATIENCE_SECONDS = 30.0


def receive(address: str, port: int) -> None:
    with socket.create_server((address, port)) as server:
        connection, _ = server.accept()
        with connection:
            into = bytearray(1 << 18)
            while connection.recv_into(into):
                pass


def send(address: str, port: int, bytes_per_second: int, type_of_service: int, start_ns: int, end_ns: int) -> None:
    """Send until `end_ns` from now (-1: until killed) at a rate (0: no limit)."""
    began = time.monotonic_ns()
    with _connected(address, port) as connection:
        connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, type_of_service)
        if bytes_per_second:
            # 32 bits, as every kernel accepts; all ones mean no limit
            connection.setsockopt(
                socket.SOL_SOCKET, _SO_MAX_PACING_RATE, min(bytes_per_second, 2**32 - 2).to_bytes(4, "little")
            )
        connection.settimeout(None)
        time.sleep(max(0, began + start_ns - time.monotonic_ns()) / 1e9)
        while end_ns < 0 or time.monotonic_ns() - began < end_ns:
            connection.send(_BLOCK)


def _connected(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return socket.create_connection((address, port), _PATIENCE_SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2], int(sys.argv[3]))
    else:
        rate, tos, start, end = map(int, sys.argv[4:8])
        send(sys.argv[2], int(sys.argv[3]), rate, tos, start, end)
