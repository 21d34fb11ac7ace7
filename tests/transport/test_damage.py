"""Bytes that were damaged, cut off or made up: found before they are used, by whoever reads them."""

from __future__ import annotations

import hashlib
import hmac
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from gradlane.errors import CommunicationError, CorruptError, JobError, PeerDied
from gradlane.transport import Node, NodeOptions
from tests.processes import resident_bytes
from tests.transport.frames import (
    ACKNOWLEDGE,
    CHALLENGE,
    CHECKSUM,
    HEADER_BYTES,
    PING,
    PROOF,
    PUSH,
    RECEIVED,
    RESULT,
    WELCOME,
    exactly,
    frame,
    hello,
)
from tests.transport.proxy import Proxy, proxy

pytestmark = pytest.mark.matrix

GREETING_UP = HEADER_BYTES + len(hello()) + HEADER_BYTES + 32
"""Where the first frame after the greeting begins, towards the server: behind hello and proof."""
GREETING_DOWN = HEADER_BYTES + 64 + HEADER_BYTES
"""And from it: behind challenge and welcome."""
WORDS = 500


@contextmanager
def pair(prepare: Callable[[Proxy], None]) -> Iterator[tuple[Node, Node, Proxy]]:
    """A server (rank 0) and a worker (rank 1) that reaches it through a proxy; both closed at the end, in any order."""
    with (
        Node(NodeOptions(world=2, servers=1, rank=0, server=0, linger_s=0.05)) as server,
        proxy(("127.0.0.1", server.port)) as wire,
        Node(NodeOptions(world=2, servers=1, rank=1, server=None, linger_s=0.05)) as worker,
    ):
        prepare(wire)
        worker.dial(0, *wire.address)
        worker.join(5)
        server.join(5)
        yield server, worker, wire


def outcome_of_a_sum(server: Node, worker: Node) -> tuple[JobError | None, JobError | None]:
    """Push 2,000 bytes from both; what each fails of. Asserts that a tensor reported done is the sum."""
    tensors = [np.full(WORDS, 1, np.float32), np.full(WORDS, 2, np.float32)]
    for node, tensor in zip((server, worker), tensors, strict=True):
        node.define(0, tensor.ctypes.data, tensor.nbytes, "float32")
        node.push(0)
    failures: list[JobError | None] = []
    for node, tensor in zip((server, worker), tensors, strict=True):
        try:
            node.wait(0, 5)
            assert (tensor == 3).all()
            failures.append(None)
        except JobError as failure:
            failures.append(failure)
    return failures[0], failures[1]


def found(way: str, bit: int) -> tuple[JobError | None, JobError | None]:
    with pair(lambda wire: wire.flips.update({way: bit})) as (server, worker, _):
        return outcome_of_a_sum(server, worker)


def test_every_bit_flipped_in_a_payload_is_found_on_both_ways() -> None:
    draw = random.Random(4)
    for way, begin in (("up", GREETING_UP), ("down", GREETING_DOWN)):
        for _ in range(100):
            bit = 8 * (begin + HEADER_BYTES) + draw.randrange(8 * 4 * WORDS)
            at_server, at_worker = found(way, bit)
            assert isinstance(at_worker, CorruptError), (way, bit, at_worker)
            # who pushes hears it from the server; the server's own sum was whole before it was damaged on its way
            assert isinstance(at_server, CorruptError) or way == "down", (way, bit, at_server)


def test_every_bit_flipped_in_a_header_is_found_on_both_ways() -> None:
    for way, begin in (("up", GREETING_UP), ("down", GREETING_DOWN)):
        for bit in range(8 * HEADER_BYTES):
            failures = found(way, 8 * begin + bit)
            at_worker = failures[1]
            assert isinstance(at_worker, CommunicationError), (way, bit, at_worker)
            if bit >= 16:  # before it stands the mark by which a frame is known at all
                assert isinstance(at_worker, CorruptError), (way, bit, at_worker)


@pytest.mark.parametrize("end", [GREETING_UP + 7, GREETING_UP + HEADER_BYTES, GREETING_UP + HEADER_BYTES + 1999])
def test_a_frame_cut_off_in_its_middle_is_dropped_and_both_ends_know(end: int) -> None:
    with pair(lambda wire: wire.ends.update({"up": end})) as (server, worker, _):
        at_server, at_worker = outcome_of_a_sum(server, worker)
    assert isinstance(at_server, PeerDied)
    assert at_server.rank == 1
    assert isinstance(at_worker, PeerDied)
    assert at_worker.rank == 0


LIES = {
    "a length of 2^32-1": frame(PUSH, b"", length=2**32 - 1),
    "an offset of 2^64-8": frame(PUSH, bytes(2000), offset=2**64 - 8),
    "an offset and a length whose sum wraps": frame(PUSH, b"", offset=2**64 - 2000, length=2000),
    "an offset past the end": frame(PUSH, bytes(2000), offset=2000),
    "a length of 0": frame(PUSH, b""),
    "less than the packet": frame(PUSH, bytes(1996)),
    "more than packets are here": frame(PUSH, b"", length=1 << 20),
    "a tensor that cannot be": frame(PUSH, bytes(2000), tensor=2**32 - 1),
    "another iteration": frame(PUSH, bytes(2000), iteration=5),
    "a sum from a worker": frame(RESULT, bytes(2000)),
    "the same packet twice": frame(PUSH, bytes(2000)) * 2,
    "that it has a push of the server's": frame(RECEIVED),
}


def greeted(port: int) -> socket.socket:
    """A connection of rank 1 to a server without a secret, past its greeting, made by hand."""
    connection = socket.create_connection(("127.0.0.1", port))
    said = hello()
    connection.sendall(frame(1, said, sender=1))
    challenge = exactly(connection, HEADER_BYTES + 64)
    assert challenge[3] == CHALLENGE
    nonce = challenge[HEADER_BYTES : HEADER_BYTES + 32]
    proof = hmac.new(b"", b"w" + said + nonce, hashlib.sha256).digest()
    connection.sendall(frame(PROOF, proof, sender=1))
    assert exactly(connection, HEADER_BYTES)[3] == WELCOME
    return connection


@pytest.mark.parametrize("lie", LIES)
def test_a_member_that_lies_is_refused_before_anything_is_allocated(lie: str) -> None:
    with Node(NodeOptions(world=2, servers=1, rank=0, server=0, linger_s=0.05)) as server, greeted(server.port) as liar:
        server.join(5)
        tensor = np.ones(WORDS, np.float32)
        server.define(0, tensor.ctypes.data, tensor.nbytes, "float32")
        before = resident_bytes()
        held = server.stats()["held_bytes"]
        liar.sendall(LIES[lie])
        with pytest.raises(JobError) as refused:
            server.take(5)
        assert "rank 1 at 127.0.0.1:" in str(refused.value)
        assert resident_bytes() - before < 1 << 20  # of everything in this process
        assert server.stats()["held_bytes"] - held <= 2 * server.options.packet_bytes
        assert (tensor == 1).all()


@contextmanager
def with_a_server_made_by_hand(**options: object) -> Iterator[tuple[Node, socket.socket]]:
    """Rank 1 of two, and its connection to the only server as that server has it, past the greeting."""
    # this server sends no pings
    fields = {"world": 2, "servers": 1, "rank": 1, "server": None, "linger_s": 0.05, "dead_s": 60.0, **options}
    with socket.create_server(("127.0.0.1", 0)) as listener, Node(NodeOptions(**fields)) as worker:  # type: ignore[arg-type]
        worker.dial(0, "127.0.0.1", listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            said = exactly(connection, HEADER_BYTES + len(hello()))[HEADER_BYTES:]
            proof = hmac.new(b"", b"s" + said + bytes(32), hashlib.sha256).digest()
            connection.sendall(frame(CHALLENGE, bytes(32) + proof))
            exactly(connection, HEADER_BYTES + 32)
            connection.sendall(frame(WELCOME))
            worker.join(5)
            yield worker, connection


def test_a_server_that_lies_is_refused_by_the_worker() -> None:
    with with_a_server_made_by_hand() as (worker, connection):
        tensor = np.ones(WORDS, np.float32)
        worker.define(0, tensor.ctypes.data, tensor.nbytes, "float32")
        connection.sendall(frame(RESULT, struct.pack("<f", 7) * WORDS, offset=2**64 - 8))
        with pytest.raises(JobError, match="rank 0 at"):
            worker.take(5)
        assert (tensor == 1).all()


def test_a_push_has_been_sent_once_its_server_says_that_it_has_it() -> None:
    packet_bytes = 64
    with with_a_server_made_by_hand(packet_bytes=packet_bytes) as (worker, connection):
        asks, plain = (np.ones(3 * packet_bytes // 4, np.float32) for _ in range(2))
        for tensor, memory in enumerate((asks, plain)):
            worker.define(tensor, memory.ctypes.data, memory.nbytes, "float32", acknowledged=memory is asks)
            worker.push(tensor, notify_sent=True)
        flags = []
        while len(flags) < 6:
            header = exactly(connection, HEADER_BYTES)
            if header[3] == PUSH:
                flags.append(int.from_bytes(header[30:32], "little") & ~CHECKSUM)
                exactly(connection, packet_bytes)
        assert flags == [0, 0, ACKNOWLEDGE, 0, 0, 0]
        for tensor in (0, 1):
            for place in range(3):
                connection.sendall(frame(RESULT, bytes(packet_bytes), tensor=tensor, offset=place * packet_bytes))
        worker.wait(1, 10)
        assert not worker.is_done(0)  # whose sum came earlier, on the same connection
        assert sorted(_taken(worker, 2)) == [~1, 1]
        connection.sendall(frame(RECEIVED, tensor=0))
        worker.wait(0, 10)
        assert sorted(_taken(worker, 2)) == [~0, 0]
        connection.sendall(frame(RECEIVED, tensor=0))
        with pytest.raises(JobError, match=r"rank 0 at .* says that it has a push, and was not asked"):
            worker.take(10)


def _taken(worker: Node, count: int) -> list[int]:
    told: list[int] = []
    while len(told) < count:
        told += worker.take(10)
    return told


def test_a_server_answers_the_last_packet_of_a_push_before_the_others_push_theirs() -> None:
    packet_bytes = 64
    options = NodeOptions(world=2, servers=1, rank=0, server=0, linger_s=0.05, packet_bytes=packet_bytes)
    with Node(options) as server, greeted(server.port) as member:
        server.join(5)
        tensor = np.ones(2 * packet_bytes // 4, np.float32)
        # both packets come before the server knows their tensor
        member.sendall(frame(PUSH, bytes(packet_bytes)))
        member.sendall(frame(PUSH, bytes(packet_bytes), offset=packet_bytes, flags=ACKNOWLEDGE))
        answers = []
        while RECEIVED not in answers:
            answers.append(exactly(member, HEADER_BYTES)[3])
        assert set(answers) <= {PING, RECEIVED}
        server.define(0, tensor.ctypes.data, tensor.nbytes, "float32")
        server.push(0)
        assert server.take(10) == [0]
        assert (tensor == 1).all()
