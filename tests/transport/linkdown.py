"""Run by both ranks of a two-host lab: rank 1 takes its own link down; both say what they fail of, and when.

argv: "idle" or "sending". Each prints a line of JSON: its rank, the error's type, the rank that it blames, seconds after the
link went down, by the clock that all processes of a host share. Rank 0 tells rank 1 its port beforehand, and the other way.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from fcntl import ioctl

import numpy as np

from gradlane.errors import PeerError
from gradlane.transport import Node, NodeOptions

SIOCSIFFLAGS = 0x8914
PORT, DOOR, LIMIT_S = 7100, 7101, 30
rank = int(os.environ["RANK"])
addresses = ["10.77.0.1", "10.77.0.2"]


def meet() -> None:
    """Return once both nodes listen."""
    if rank == 0:
        with socket.create_server((addresses[0], DOOR)) as door, door.accept()[0] as other:
            other.recv(1)
        return
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            socket.create_connection((addresses[0], DOOR), LIMIT_S).sendall(b"!")
            return
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise


with Node(
    NodeOptions(world=2, servers=2, rank=rank, server=rank, secret=b"lab", address=addresses[rank], port=PORT, linger_s=0.1)
) as node:
    meet()
    node.dial(1 - rank, addresses[1 - rank], PORT)
    node.join(LIMIT_S)
    tensor = np.ones(1 << 24, np.float32)
    node.define(0, tensor.ctypes.data, tensor.nbytes, "float32")
    if sys.argv[1] == "sending":
        node.push(0)
    time.sleep(1)
    down_at = time.monotonic()
    if rank == 1:
        with socket.socket() as any_socket:
            ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"eth0", 0))
    try:
        node.take(LIMIT_S)
        failed = {"error": "", "blames": None}
    except PeerError as error:
        failed = {"error": type(error).__name__, "blames": error.rank}
    print(json.dumps({"rank": rank, **failed, "seconds": time.monotonic() - down_at}), flush=True)
