"""A member that has proved itself and then breaks the protocol: the server ends the job, and names that member."""

from __future__ import annotations

import hashlib
import hmac
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gradlane.errors import CapacityError, CommunicationError, JobError, PeerDied, PeerFailed
from gradlane.transport import Node, NodeOptions
from tests.transport.frames import ABORT, DEFINE, FORGET, HEADER_BYTES, HELLO, PING, PROOF, PUSH, define, exactly, frame, hello
from tests.transport.jobs import Member, job, servers_apart

pytestmark = pytest.mark.matrix

PACKET = 64
MIB = 1 << 20


class Proven:
    """A worker without a node: it has been greeted, and says whatever it is told to."""

    def __init__(self, rank: int, world: int, port: int, receive_buffer: int | None = None) -> None:
        self.rank = rank
        self.socket = socket.socket()
        self.socket.settimeout(10)
        # Before it connects. A buffer made smaller later throws away what its earlier window let in, and then also
        # the acknowledgements that tell of room at the server: the pushes stop for good, and nothing is tested.
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect(("127.0.0.1", port))
        said = hello(rank, world)
        self.socket.sendall(frame(HELLO, said))
        challenge = exactly(self.socket, HEADER_BYTES + 64)[HEADER_BYTES:]
        self.socket.sendall(frame(PROOF, hmac.digest(b"", b"w" + said + challenge[:32], hashlib.sha256)))
        exactly(self.socket, HEADER_BYTES)  # WELCOME

    def say(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frames))


def push(tensor: int, place: int, iteration: int) -> bytes:
    return frame(PUSH, bytes(PACKET), tensor=tensor, offset=place * PACKET, iteration=iteration)


@contextmanager
def server_of(world: int, receive_buffer: int | None = None, **options: object) -> Iterator[tuple[Node, list[Proven]]]:
    """A server without a worker, and its proven members, of which the last has this receive buffer, in bytes."""
    with ExitStack() as stack:
        fields = {"packet_bytes": PACKET, "linger_s": 0.1, **options}
        node = stack.enter_context(Node(NodeOptions(world=world, servers=1, rank=None, server=0, tell_tables=True, **fields)))  # type: ignore[arg-type]
        members = [Proven(rank, world, node.port, receive_buffer if rank == world - 1 else None) for rank in range(world)]
        for member in members:
            stack.enter_context(member.socket)
        node.join(5)
        yield node, members


def failure_of(node: Node) -> JobError:
    with pytest.raises(JobError) as raised:
        node.take(10)  # nothing was pushed here: a failure alone ends it
    return raised.value


def two_packets(**fields: int) -> bytes:
    return define(2 * PACKET, **fields)


MISDEEDS = {
    "a packet of the next iteration of a sum that is not whole yet": (
        [frame(DEFINE, two_packets(whole=1, sender=1)), push(0, 0, 0), push(0, 0, 1)],
        "one sender or receiver",
    ),
    "a part of an element": ([frame(DEFINE, define(3))], "a part of an element"),
    "an id that is not the next": ([frame(DEFINE, define(4), tensor=7)], "not a definition that can be used"),
    "a rank that is not there": ([frame(DEFINE, define(4, sender=5))], "tensor 0"),
    "a type that is none": ([frame(DEFINE, define(4, dtype=99))], "a definition that cannot be"),
    "the end of what nobody has told of": ([frame(FORGET, tensor=9)], "has ended tensors that nobody has told of"),
    "the end of a sum under way": (
        [frame(DEFINE, two_packets()), push(0, 0, 0), frame(FORGET, tensor=1)],
        "has ended tensor 0, of which sums are under way",
    ),
}


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_the_member_that_broke_the_protocol_is_named(misdeed: str) -> None:
    frames, text = MISDEEDS[misdeed]
    with server_of(2) as (node, members):
        members[1].say(*frames)
        failure = failure_of(node)
        assert "rank 1" in str(failure), failure
        assert text in str(failure), failure
        assert node.native.failure()[1:3] == (1, -1)


def test_a_server_that_fails_and_closes_reads_what_was_under_way_so_that_no_reset_outruns_its_reason() -> None:
    with server_of(2, linger_s=10) as (node, members):
        members[1].socket.close()
        failure_of(node)
        # more than one turn of the server's reads
        members[0].say(frame(PING) * (4 * MIB // HEADER_BYTES))
        members[0].socket.shutdown(socket.SHUT_WR)
        node.close()
        heard = b""
        while more := members[0].socket.recv(MIB):  # a reset raises here
            heard += more
    assert b"rank 1 at 127.0.0.1:" in heard


def reason(code: int, blamed: int, text: bytes) -> bytes:
    return struct.pack("<Bi", code, blamed) + text


# what rank 1 gives as its reason, and the error that follows: its type, its rank, and its text
REASONS = {
    "none at all": (b"", PeerFailed, 1, "rank 1 has ended the job and gave no reason"),
    "less than a header": (b"\x01\x00", PeerFailed, 1, "rank 1 has ended the job and gave no reason"),
    "no text": (reason(1, 0, b""), PeerFailed, 1, "rank 1 has ended the job and gave no reason"),
    "a code that does not exist": (reason(77, -1, b"no more"), PeerFailed, 1, "rank 1 says: no more"),
    "the code of no failure": (reason(0, -1, b"no more"), PeerFailed, 1, "rank 1 says: no more"),
    "a rank that does not exist": (reason(1, 7, b"rank 7 is gone"), PeerDied, 1, "rank 1 says: rank 7 is gone"),
    "a server that does not exist": (reason(1, -9, b"it is gone"), PeerDied, 1, "rank 1 says: it is gone"),
    "the least number": (reason(1, -(2**31), b"it is gone"), PeerDied, 1, "rank 1 says: it is gone"),
    "another rank": (reason(1, 0, b"rank 0 is gone"), PeerDied, 0, "rank 1 says: rank 0 is gone"),
    "another rank's words as its own": (reason(3, -1, b"rank 0 failed"), PeerFailed, 1, "rank 1 says: rank 0 failed"),
    "a rank that begins as its own": (reason(3, 1, b"rank 10 failed"), PeerFailed, 1, "rank 1 says: rank 10 failed"),
    "its own name": (reason(3, 1, b"rank 1 failed: no image"), PeerFailed, 1, "rank 1 failed: no image"),
    "what cannot be printed": (reason(9, -1, b"rank 1 \x1b[2J\n"), CommunicationError, 1, "rank 1 ?[2J?"),
}


@pytest.mark.parametrize("given", REASONS)
def test_whoever_ends_the_job_is_named_as_the_one_who_says_why(given: str) -> None:
    payload, kind, rank, text = REASONS[given]
    with server_of(2) as (node, members):
        members[1].say(frame(ABORT, payload, sender=1))
        failure = failure_of(node)
        assert type(failure) is kind
        assert str(failure) == f"transport: {text}"
        assert node.native.failure()[1:3] == (rank, -1)


def test_who_ends_a_tensor_too_early_is_named_and_not_who_goes_on_with_it() -> None:
    with server_of(2) as (node, members):
        members[1].say(frame(DEFINE, two_packets()), frame(FORGET, tensor=1))
        while node.stats()["received_packets"] < 2 * 2 + 2:
            time.sleep(0.001)
        members[0].say(push(0, 0, 0))
        failure = failure_of(node)
        assert "rank 1 has ended tensor 0, and rank 0 goes on with it" in str(failure)
        assert node.native.failure()[1:3] == (1, -1)


def test_a_member_that_takes_no_sums_is_named_before_they_fill_the_memory() -> None:
    size = 100 * (30 << 10)
    with server_of(2, receive_buffer=4096, packet_bytes=30 << 10) as (node, members):
        members[0].say(frame(DEFINE, define(size)))
        parts = [frame(PUSH, bytes(30 << 10), offset=place * (30 << 10), iteration=0) for place in range(100)]
        members[0].say(*parts)
        try:
            for iteration in range(200):
                for place in range(100):
                    one = frame(PUSH, bytes(30 << 10), offset=place * (30 << 10), iteration=iteration)
                    if iteration:
                        members[0].say(one)
                    members[1].say(one)
                exactly(members[0].socket, size + 100 * HEADER_BYTES)
        except (ConnectionError, AssertionError):
            pass
        failure = failure_of(node)
        assert "rank 1" in str(failure)
        assert "does not take its sums" in str(failure)
        assert node.stats()["most_held_bytes"] < 4 * size


def test_packets_in_flight_count_in_what_a_server_admits() -> None:
    # additions in order of rank: each worker's part is held until the last has come
    with server_of(4, rank_order=True, max_bytes=64 * MIB, packet_bytes=30 << 10) as (node, members):
        members[0].say(frame(DEFINE, define(64 * MIB)))
        failure = failure_of(node)
        assert isinstance(failure, CapacityError)
        assert "tensor 0, told by rank 0" in str(failure)


def _leave_little_memory(member: Member, spare: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))


def test_a_server_that_runs_out_of_memory_says_so_to_all_and_its_process_goes_on() -> None:
    # an arena of the allocator, 64 MiB, counts as used already
    with job(servers_apart(2, 1), sizes=(128 * MIB,)) as running:
        first, second, server = running.members
        server.call("apply", _leave_little_memory, 16 * MIB)
        second.begin("wait_for_failure")  # without its part, the server has to keep all of the first one's
        first.begin("iterate_until_failure")
        outcomes = [first.outcome(), second.outcome()]
        assert [outcome.error for outcome in outcomes] == ["CapacityError"] * 2, outcomes
        assert all("server 0 cannot go on" in outcome.text for outcome in outcomes)
        server.begin("wait_for_failure")
        assert server.outcome().error == "CapacityError"  # said by a process that is still there
