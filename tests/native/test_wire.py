"""The wire format, written a second time from native/wire/wire.md, beside the data plane's own bytes."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlane._native import crc32c, encode_header
from gradlane.errors import CommunicationError, MismatchError
from gradlane.transport import ANYONE, Node, NodeOptions, Sgd
from tests.transport.frames import exactly

pytestmark = pytest.mark.matrix

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "wire.json").read_text())


def crc(data: bytes) -> int:
    """CRC32C by its definition, a bit at a time."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def header(type, flags, tensor, offset, length, iteration, priority, sender, payload_crc):
    fields = (0x4C47, 1, type, tensor, offset, length, iteration, priority, sender, flags, payload_crc)
    head = struct.pack("<HBBIQIIIHHI", *fields)
    return head + struct.pack("<I", crc(head))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_headers(name):
    fields, expected = GOLDEN[name]["fields"], bytes.fromhex(GOLDEN[name]["bytes"])
    assert header(**fields) == expected
    assert encode_header(**fields) == expected


@given(
    type=st.integers(1, 17),
    flags=st.integers(0, 2**16 - 1),
    tensor=st.integers(0, 2**32 - 1),
    offset=st.integers(0, 2**64 - 1),
    length=st.integers(0, 2**32 - 1),
    iteration=st.integers(0, 2**32 - 1),
    priority=st.integers(0, 2**32 - 1),
    sender=st.integers(0, 2**16 - 1),
    payload_crc=st.integers(0, 2**32 - 1),
)
def test_any_header_is_that_of_the_document(**fields):
    assert encode_header(**fields) == header(**fields)


@given(data=st.binary(max_size=300))
def test_the_checksum_is_crc32c(data):
    assert crc32c(data) == crc(data)


HELLO, CHALLENGE, PROOF, WELCOME, REJECT, PUSH, RESULT, PING, GOODBYE, RULE = 1, 2, 3, 4, 5, 8, 9, 10, 12, 13
MESSAGE, PART, ACCEPT, TAKEN = 14, 15, 16, 17
CHECKSUM, QUIET = 1, 2
SECRET = b"a secret of this job"
PATIENCE_S = 20


class Worker:
    """The document as a program: rank 1 of two, for a server in rank 0's process."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)

    def say(self, type, payload=b"", flags=CHECKSUM, **fields):
        named = dict.fromkeys(["tensor", "offset", "iteration", "priority"], 0) | fields
        self.socket.sendall(header(type, flags, length=len(payload), sender=1, payload_crc=crc(payload), **named) + payload)

    def hear(self):
        """The next frame that is no PING: its type, tensor, offset, iteration and payload."""
        while True:
            head = exactly(self.socket, 40)
            fields = struct.unpack("<HBBIQIIIHHII", head)
            assert fields[:2] == (0x4C47, 1)
            assert fields[-1] == crc(head[:36])
            payload = exactly(self.socket, fields[5])
            assert fields[9:11] == (1, crc(payload))
            if fields[2] != PING:
                return fields[2], fields[3], fields[4], fields[6], payload

    def greet(self, secret):
        """The server's answer to the proof."""
        hello = struct.pack("<IIIIHHBBHQQ32s32s", 1, 2, 0, 1, 0, 1, 0, 0, 0, 42, 3, bytes(32), b"n" * 32)
        self.say(HELLO, hello)
        type, _, _, _, payload = self.hear()
        assert type == CHALLENGE
        nonce, proof = payload[:32], payload[32:]
        assert proof == hmac.digest(SECRET, b"s" + hello + nonce, hashlib.sha256)
        self.say(PROOF, hmac.digest(secret, b"w" + hello + nonce, hashlib.sha256))
        return self.hear()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()


def test_a_worker_written_from_the_document_joins_and_sums():
    options = NodeOptions(world=2, servers=1, rank=0, server=0, job=42, generation=3, secret=SECRET, packet_bytes=64)
    ours, theirs = np.arange(20, dtype=np.float32), np.full(20, 100, np.float32)
    expected = ours + theirs
    with Node(options) as node, Worker(node.port) as other:
        assert other.greet(SECRET)[0] == WELCOME
        node.join(PATIENCE_S)
        node.define(0, ours.ctypes.data, ours.nbytes, "float32")
        node.push(0)
        other.say(PUSH, theirs.tobytes()[64:], offset=64)
        other.say(PUSH, theirs.tobytes()[:64], offset=0)
        heard = sorted(other.hear() for _ in range(2))
        assert heard == [
            (RESULT, 0, 0, 0, expected.tobytes()[:64]),
            (RESULT, 0, 64, 0, expected.tobytes()[64:]),
        ]
        node.wait(0, PATIENCE_S)
        assert (ours == expected).all()
        other.say(GOODBYE)
        node.close()
        assert other.hear()[0] == GOODBYE


def rule(kind, flags, lr, decay, first, second, epsilon):
    return struct.pack("<BBHIddddd", kind, flags, 0, 0, lr, decay, first, second, epsilon)


def test_a_worker_written_from_the_document_trains_with_servers_that_update():
    options = NodeOptions(world=2, servers=1, rank=0, server=0, job=42, generation=3, secret=SECRET, packet_bytes=64)
    ours = np.arange(8, dtype=np.float32)
    sgd = Sgd(lr=0.5, momentum=0.5, nesterov=True)
    with Node(options) as node, Worker(node.port) as other:
        assert other.greet(SECRET)[0] == WELCOME
        node.join(PATIENCE_S)
        node.define_updated(0, ours.ctypes.data, ours.nbytes, sgd, staleness=0, group=7)
        node.push(0)
        other.say(PUSH, np.full(8, 9, np.float32).tobytes())
        first = np.arange(8, dtype=np.float32)
        assert other.hear() == (RESULT, 0, 0, 0, first.tobytes())
        node.wait(0, PATIENCE_S)
        assert (ours == first).all()
        node.set_rule(7, sgd)
        other.say(RULE, rule(2, 1, 0.5, 0, 0.5, 0, 0), tensor=7)
        ours[:] = 1
        node.push(0)
        other.say(PUSH, np.full(8, 3, np.float32).tobytes(), iteration=1)
        second = first - 0.5 * (4 + 0.5 * 4)
        assert other.hear() == (RESULT, 0, 0, 1, second.tobytes())
        node.wait(0, PATIENCE_S)
        assert (ours == second).all()
        node.push(0, quiet=True)
        other.say(PUSH, bytes(32), flags=CHECKSUM | QUIET, iteration=2)
        assert other.hear() == (RESULT, 0, 0, 2, second.tobytes())
        other.say(GOODBYE)
        node.close()
        assert other.hear()[0] == GOODBYE


@pytest.mark.parametrize(
    "said",
    [
        rule(0, 0, 0.1, 0, 0, 0, 0),
        rule(5, 0, 0.1, 0, 0, 0, 0),
        rule(1, 0, -0.1, 0, 0, 0, 0),
        rule(1, 0, float("nan"), 0, 0, 0, 0),
        rule(1, 0, 0.1, 0, 0.9, 0, 0),
        rule(2, 0, 0.1, 0, 0, 0, 0),
        rule(2, 1, 0.1, 0, 0.9, 0.5, 0),
        rule(3, 0, 0.1, float("inf"), 0.9, 0.9, 0),
        rule(4, 0, 0.1, 0, 0.9, 1.0, 1e-8),
        rule(4, 0, 0.1, 0, 0.9, 0.9, -1e-8),
    ],
    ids=lambda said: said.hex()[:2],
)
def test_a_rule_that_the_document_does_not_allow_ends_the_connection(said):
    options = NodeOptions(world=2, servers=1, rank=0, server=0, job=42, generation=3, secret=SECRET, linger_s=0.1)
    with Node(options) as node, Worker(node.port) as other:
        assert other.greet(SECRET)[0] == WELCOME
        node.join(PATIENCE_S)
        other.say(RULE, said, tensor=7)
        with pytest.raises(CommunicationError, match="rank 1 at 127"):
            node.take(PATIENCE_S)


def letters(options):
    """A node, and a worker that has joined it and sends it messages."""
    node = Node(options)
    other = Worker(node.port)
    assert other.greet(SECRET)[0] == WELCOME
    node.join(PATIENCE_S)
    return node, other


def test_a_worker_written_from_the_document_sends_messages():
    options = NodeOptions(world=2, servers=1, rank=0, server=0, job=42, generation=3, secret=SECRET, packet_bytes=64)
    node, other = letters(options)
    small, large, late = np.zeros(8, np.uint8), np.zeros(100, np.uint8), np.zeros(8, np.uint8)
    with node, other:
        other.say(MESSAGE, b"12345678", offset=8, iteration=5)
        other.say(MESSAGE, tensor=1, offset=100, iteration=6)
        wait = node.receive(ANYONE, 5, small.ctypes.data, 8)
        node.wait_for(wait, PATIENCE_S, "a small message")
        assert node.is_over(wait) == (True, 1)
        assert small.tobytes() == b"12345678"
        offered = node.receive(1, 6, large.ctypes.data, 100)
        assert other.hear()[:2] == (ACCEPT, 1)
        other.say(PART, bytes(range(64)), tensor=1, iteration=6)
        assert node.is_over(offered)[0] is False
        other.say(PART, bytes(range(64, 100)), tensor=1, offset=64, iteration=6)
        node.wait_for(offered, PATIENCE_S, "a large message")
        assert large.tobytes() == bytes(range(100))
        waiting = node.receive(1, 7, late.ctypes.data, 8)
        taken = 0
        for number in range(2, 2 + (1 << 21) // 128):
            other.say(MESSAGE, bytes(64), tensor=number, offset=64, iteration=9)
            node.wait_for(node.receive(1, 9, large.ctypes.data, 64), PATIENCE_S, "one of many")
        while taken < 1 << 20:
            type, count, *_ = other.hear()
            assert type == TAKEN
            assert count >= 1 << 19
            taken += count
        other.say(MESSAGE, b"abcdefgh", tensor=number + 1, offset=8, iteration=7)
        node.wait_for(waiting, PATIENCE_S, "the last message")
        assert late.tobytes() == b"abcdefgh"
        other.say(GOODBYE)
        node.close()


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ([(MESSAGE, bytes(8), {"offset": 9})], CommunicationError),
        ([(MESSAGE, bytes(65), {"offset": 65})], CommunicationError),
        ([(MESSAGE, b"", {"offset": 65})] * 2, CommunicationError),
        ([(MESSAGE, bytes(64), {"offset": 64})] * ((1 << 21) // 128 + 1), CommunicationError),
        ([(PART, bytes(8), {})], CommunicationError),
        ([(ACCEPT, b"", {})], CommunicationError),
        ([(TAKEN, b"", {"tensor": 1})], CommunicationError),
        ([(MESSAGE, bytes(8), {"offset": 8, "iteration": 1})], MismatchError),
        ([(MESSAGE, b"", {"offset": 80, "iteration": 1})], MismatchError),
    ],
    ids=["size", "too large", "twice", "credit", "part", "accept", "taken", "mismatch", "offered mismatch"],
)
def test_a_message_that_the_document_does_not_allow_ends_the_job(said, kind):
    options = NodeOptions(
        world=2, servers=1, rank=0, server=0, job=42, generation=3, secret=SECRET, packet_bytes=64, linger_s=0.1
    )
    node, other = letters(options)
    into = np.zeros(100, np.uint8)
    with node, other:
        awaited = node.receive(1, 1, into.ctypes.data, 100)
        with contextlib.suppress(ConnectionError):  # the node hangs up at the first that is wrong
            for type, payload, fields in said:
                other.say(type, payload, **fields)
        with pytest.raises(kind, match="rank 1"):
            node.wait_for(awaited, PATIENCE_S, "what never comes")


def test_whoever_proves_another_secret_is_rejected():
    options = NodeOptions(world=2, servers=1, rank=0, server=0, job=42, generation=3, secret=SECRET)
    with Node(options) as node, Worker(node.port) as other:
        type, *_, reason = other.greet(b"another")
        assert type == REJECT
        assert reason == struct.pack("<Bi", 6, -1) + b"wrong secret"
        assert node.failure() is None
