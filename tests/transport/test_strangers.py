"""Whatever connects to a server's port without belonging to the job is hung up on, and disturbs nobody."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from gradlane.errors import CommunicationError, PeerDied
from gradlane.transport import Node, NodeOptions
from gradlane.transport.formation import form
from tests.ports import free_port
from tests.processes import AT_ONCE_S
from tests.transport.frames import DEFINE, GOODBYE, HELLO, PING, PUSH, RESULT, WELCOME, define, exactly, frame, hello
from tests.transport.jobs import Member, each_with_a_server, job
from tests.transport.proxy import proxy

SECRET = b"x" * 32
GREETING_S = 5.0


def time_until_closed(data: bytes, port: int, limit_s: float = 10) -> float:
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(limit_s)
        began = time.monotonic()
        try:
            stranger.sendall(data)
            while stranger.recv(1 << 16):
                pass
        except (ConnectionResetError, BrokenPipeError):
            pass
        return time.monotonic() - began


JUNK = {
    "random bytes": bytes((7 * i * i + 3 * i) % 251 for i in range(64)),
    "HTTP": b"GET / HTTP/1.1\r\nHost: somewhere\r\nUser-Agent: curl\r\nAccept: */*\r\n\r\n",
    "TLS": bytes.fromhex("1603010200010001fc0303") + bytes(range(200)),
    "zeroes": bytes(1000),
    "a push": frame(PUSH, bytes(1024)),
    "a result": frame(RESULT, bytes(1024)),
    "a welcome": frame(WELCOME),
    "a goodbye": frame(GOODBYE),
    "a ping": frame(PING),
    "a definition": frame(DEFINE, define(1 << 40)),
    "a hello of the wrong length": frame(HELLO, bytes(10)),
    "a push of 2^32-1 bytes": frame(PUSH, b"", length=2**32 - 1),
    "a hello of 2^32-1 bytes": frame(HELLO, b"", length=2**32 - 1),
}


def test_junk_is_hung_up_on_at_once_while_a_job_runs_undisturbed() -> None:
    with job(each_with_a_server(2, secret=SECRET)) as running:
        for member in running.members:
            member.begin("iterate_for", 1.5)
        took = {name: time_until_closed(data, running[0].port) for name, data in JUNK.items()}
        assert [outcome.error for outcome in [member.outcome() for member in running.members]] == ["", ""]
        assert running[0].call("stats")["refused"] == len(JUNK)
    assert max(took.values()) <= AT_ONCE_S, took


def test_one_who_says_nothing_or_too_little_is_hung_up_on_in_five_seconds() -> None:
    with Node(NodeOptions(world=2, servers=1, rank=0, server=0)) as node:
        took: list[float] = []
        said = [b"", frame(HELLO, hello())[:17], frame(HELLO, hello()), b"\x47"]
        threads = [threading.Thread(target=lambda data=data: took.append(time_until_closed(data, node.port))) for data in said]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(took) == len(said)
        assert all(GREETING_S - 0.5 <= seconds <= GREETING_S + AT_ONCE_S for seconds in took), took
        assert node.failure() is None


@pytest.fixture
def _many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4000:
        pytest.skip(f"needs 4000 descriptors, and {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4000), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def silent(port: int, count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        yield


@pytest.mark.usefixtures("_many_descriptors")
def test_a_thousand_who_never_greet_keep_nobody_from_joining() -> None:
    with (
        Node(NodeOptions(world=2, servers=2, rank=0, server=0)) as first,
        Node(NodeOptions(world=2, servers=2, rank=1, server=1)) as second,
        silent(first.port, 1000),
        silent(second.port, 1000),
    ):
        began = time.monotonic()
        first.dial(1, "127.0.0.1", second.port)
        second.dial(0, "127.0.0.1", first.port)
        first.join(10)
        second.join(10)
        assert time.monotonic() - began <= AT_ONCE_S
        held = [len(_connections(node.port)) for node in (first, second)]
        assert max(held) <= 64 + 2


def call(port: int, address: str = "127.0.0.1", says: bytes = b"") -> socket.socket:
    """A connection with a server of this host, from one of its loopback addresses."""
    caller = socket.create_connection(("127.0.0.1", port), 10, (address, 0))
    caller.sendall(says)
    return caller


def test_whoever_has_said_nothing_yet_stays_while_another_address_takes_all_places() -> None:
    with Node(NodeOptions(world=2, servers=1, rank=0, server=0, secret=SECRET)) as node, ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(call(node.port, "127.0.0.2", b"G"))
        honest = stack.enter_context(call(node.port))
        # whose hello is on its way while the others call again and again
        for _ in range(200):
            stack.enter_context(call(node.port, "127.0.0.2", b"G"))
        while node.stats()["refused"] < 200 + 1:
            time.sleep(0.001)
        honest.sendall(frame(HELLO, hello()))
        assert len(exactly(honest, 40 + 64)) == 104  # the challenge


def test_the_last_to_call_stay_where_all_come_from_one_address() -> None:
    with Node(NodeOptions(world=2, servers=1, rank=0, server=0, secret=SECRET)) as node, ExitStack() as stack:
        callers = [stack.enter_context(call(node.port, says=b"G")) for _ in range(64)]
        callers += [stack.enter_context(call(node.port)) for _ in range(64)]
        while node.stats()["refused"] < 64:
            time.sleep(0.001)
        for caller in callers[64:]:
            caller.sendall(frame(HELLO, hello()))
            assert len(exactly(caller, 40 + 64)) == 104
        assert all(_is_closed(caller) for caller in callers[:64])


def _is_closed(caller: socket.socket) -> bool:
    try:
        return caller.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_dialler_on_whom_a_server_hangs_up_calls_again() -> None:
    with (
        Node(NodeOptions(world=2, servers=1, rank=0, server=0, secret=SECRET)) as server,
        proxy(("127.0.0.1", server.port)) as wire,
        Node(NodeOptions(world=2, servers=1, rank=1, server=None, secret=SECRET, linger_s=0.1, greeting_s=60)) as worker,
    ):
        wire.ends["up"] = 1
        worker.dial(0, *wire.address)
        while server.stats()["refused"] < 3:
            time.sleep(0.001)
        wire.ends.clear()
        worker.join(30)
        server.join(30)


def test_a_dialler_calls_no_more_when_its_time_is_up_and_says_how_often_it_did() -> None:
    with (
        Node(NodeOptions(world=2, servers=1, rank=0, server=0, secret=SECRET)) as server,
        proxy(("127.0.0.1", server.port)) as wire,
        Node(NodeOptions(world=2, servers=1, rank=1, server=None, secret=SECRET, greeting_s=0.7)) as worker,
    ):
        wire.ends["up"] = 1
        worker.dial(0, *wire.address)
        said = r"rank 0 at 127\.0\.0\.1:\d+: no end of the greeting within 700 ms, in \d+ attempts"
        with pytest.raises(CommunicationError, match=said):
            worker.join(30)


def test_whoever_is_gone_is_not_called_again() -> None:
    port = free_port()
    with Node(NodeOptions(world=2, servers=1, rank=1, server=None, secret=SECRET, greeting_s=600)) as worker:
        worker.dial(0, "127.0.0.1", port)
        with pytest.raises(PeerDied, match="Connection refused"):
            worker.join(30)


class MemoryStore(dict[str, bytes]):
    """A store of one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        assert set(keys) <= set(self)

    def delete_key(self, key: str) -> None:
        del self[key]


def test_a_greeting_has_the_whole_time_in_which_a_job_meets() -> None:
    with form(MemoryStore(), NodeOptions(world=1, servers=1, rank=0, server=0), "127.0.0.1", 300) as node:
        assert 200 < node.options.greeting_s <= 300


def _connections(port: int) -> list[str]:
    """Those of this host that are established with `port` as their own."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [line[1] for line in lines if line[3] == "01" and int(line[1].split(":")[1], 16) == port]


def _leave_few_descriptors(member: Member, spare: int) -> None:
    used = member.descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def test_a_server_without_a_descriptor_left_hangs_up_on_new_ones_and_keeps_the_old() -> None:
    with job(each_with_a_server(2)) as running:
        running[0].call("apply", _leave_few_descriptors, 2)
        for member in running.members:
            member.begin("iterate_for", 1.0)
        with silent(running[0].port, 40):
            took = [time_until_closed(b"", running[0].port)]
        outcomes = [member.outcome() for member in running.members]
        assert [outcome.error for outcome in outcomes] == ["", ""]
        wakeups = running[0].call("stats")["wakeups"]
        time.sleep(0.5)
        assert running[0].call("stats")["wakeups"] - wakeups < 100  # it does not spin on those that it cannot take
        assert max(took) <= AT_ONCE_S


def test_a_dialler_without_the_secret_is_refused_and_changes_nothing() -> None:
    with Node(NodeOptions(world=2, servers=1, rank=0, server=0, secret=SECRET)) as server:
        with Node(NodeOptions(world=2, servers=1, rank=1, server=None, secret=b"y" * 32)) as stranger:
            stranger.dial(0, "127.0.0.1", server.port)
            with pytest.raises(Exception, match="does not know this job's secret") as refused:
                stranger.join(5)
        assert type(refused.value).__name__ == "AuthError"
        assert server.failure() is None
        with Node(NodeOptions(world=2, servers=1, rank=1, server=None, secret=SECRET, linger_s=0.1)) as own:
            own.dial(0, "127.0.0.1", server.port)
            own.join(5)
            server.join(5)


def test_a_server_that_does_not_know_the_secret_learns_no_proof_of_it() -> None:
    """It is the dialler that hangs up: the server must prove itself first."""
    with (
        Node(NodeOptions(world=2, servers=1, rank=0, server=0, secret=b"y" * 32)) as impostor,
        proxy(("127.0.0.1", impostor.port)) as wire,
        Node(NodeOptions(world=2, servers=1, rank=1, server=None, secret=SECRET)) as worker,
    ):
        worker.dial(0, *wire.address)
        with pytest.raises(Exception, match="does not know this job's secret"):
            worker.join(5)
        assert len(wire.recorded["up"]) == len(frame(HELLO, hello()))


def test_a_recorded_session_played_again_is_refused() -> None:
    with (
        Node(NodeOptions(world=2, servers=1, rank=0, server=0, secret=SECRET)) as server,
        proxy(("127.0.0.1", server.port)) as wire,
        Node(NodeOptions(world=2, servers=1, rank=1, server=None, secret=SECRET, linger_s=0.1)) as worker,
    ):
        worker.dial(0, *wire.address)
        worker.join(5)
        server.join(5)
        ours, theirs = np.ones(1000, np.float32), np.ones(1000, np.float32)
        server.define(0, ours.ctypes.data, ours.nbytes, "float32")
        worker.define(0, theirs.ctypes.data, theirs.nbytes, "float32")
        for node in (server, worker):
            node.push(0)
        for node in (server, worker):
            node.wait(0, 5)
        recorded = bytes(wire.recorded["up"])
        assert len(recorded) > 4000
        refused = server.stats()["refused"]
        # while the first one is still there: as a stranger, whose proof is of another nonce
        for length in (len(recorded), 104 + 40, 104 + 40 + 72):
            assert time_until_closed(recorded[:length], server.port) <= GREETING_S + 0.5
        assert server.failure() is None
        assert server.stats()["refused"] == refused + 3
        for node in (server, worker):
            node.push(0)
        for node in (server, worker):
            node.wait(0, 5)
        assert (ours == 4).all()


def test_a_worker_of_an_older_generation_is_refused_by_name_and_the_job_goes_on_waiting() -> None:
    with Node(NodeOptions(world=2, servers=1, rank=0, server=0, generation=4)) as server:
        with Node(NodeOptions(world=2, servers=1, rank=1, server=None, generation=3)) as zombie:
            zombie.dial(0, "127.0.0.1", server.port)
            with pytest.raises(Exception, match="generation of the job: the worker says 3, the server says 4"):
                zombie.join(5)
        assert server.failure() is None
        with Node(NodeOptions(world=2, servers=1, rank=1, server=None, generation=4, linger_s=0.1)) as own:
            own.dial(0, "127.0.0.1", server.port)
            own.join(5)
            server.join(5)


def test_another_jobs_worker_is_refused() -> None:
    with (
        Node(NodeOptions(world=2, servers=1, rank=0, server=0, job=1)) as server,
        Node(NodeOptions(world=2, servers=1, rank=1, server=None, job=2)) as other,
    ):
        other.dial(0, "127.0.0.1", server.port)
        with pytest.raises(Exception, match="another job's worker"):
            other.join(5)
        assert server.failure() is None


def test_a_second_process_of_a_rank_is_told_where_the_first_is_and_the_first_goes_on() -> None:
    with job(each_with_a_server(2)) as running:
        for member in running.members:
            member.begin("iterate_for", 1.0)
        with Node(NodeOptions(world=2, servers=2, rank=1, server=None)) as second:
            began = time.monotonic()
            second.dial(0, "127.0.0.1", running[0].port)
            with pytest.raises(Exception, match=r"rank 1 is here already, from 127\.0\.0\.1:\d+") as refused:
                second.join(5)
            assert time.monotonic() - began <= AT_ONCE_S
        assert type(refused.value).__name__ == "MismatchError"
        assert [outcome.error for outcome in [member.outcome() for member in running.members]] == ["", ""]
