"""Frames made by hand, whatever they say: what a hostile or broken peer would send. The format is in native/wire/wire.md."""

from __future__ import annotations

import socket
import struct

from gradlane import _native

HELLO, CHALLENGE, PROOF, WELCOME, REJECT, DEFINE, FORGET, PUSH, RESULT, PING, ABORT, GOODBYE, RULE = range(1, 14)
RECEIVED = 18
HEADER_BYTES = 40
CHECKSUM, ACKNOWLEDGE = 1, 32


def frame(
    kind: int,
    payload: bytes = b"",
    *,
    tensor: int = 0,
    offset: int = 0,
    length: int | None = None,
    iteration: int = 0,
    sender: int = 0,
    flags: int = 0,
) -> bytes:
    """A header with checksums that hold, then the payload. length: what the header claims, where that is not true."""
    claimed = len(payload) if length is None else length
    return (
        _native.encode_header(
            type=kind,
            flags=CHECKSUM | flags,
            tensor=tensor,
            offset=offset,
            length=claimed,
            iteration=iteration,
            priority=0,
            sender=sender,
            payload_crc=_native.crc32c(payload),
        )
        + payload
    )


def exactly(connection: socket.socket, size: int) -> bytes:
    """The next `size` bytes of a connection, which must not end before."""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        assert more, "hung up on"
        data += more
    return data


def hello(rank: int = 1, world: int = 2, server: int = 0, servers: int = 1, nonce: bytes = bytes(32)) -> bytes:
    return struct.pack("<IIIIHHBBHQQ", rank, world, server, servers, 0, 1, 0, 0, 0, 0, 0) + bytes(32) + nonce


def define(size_bytes: int, dtype: int = 0, *, whole: int = 0, sender: int = -1) -> bytes:
    return struct.pack("<QBBBBHBBIiiiII", size_bytes, dtype, 0, whole, 0, 0, 0, 0, 0, sender, -1, -1, 0, 0)
