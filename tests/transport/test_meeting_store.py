"""Rank 0's store of a job without torch: whatever a stranger says ends its own connection and nothing else."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from gradlane.errors import CommunicationError, MismatchError
from gradlane.plugin import meeting as store_module
from gradlane.plugin.meeting import Meeting, _Connection, _serve
from gradlane.transport.strangers import MAX_STRANGERS
from tests.ports import free_port
from tests.processes import AT_ONCE_S, no_descriptor_free

SECRET = "known to the ranks"


class Stranger:
    """Whoever connects, and says whatever it likes."""

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 10, (address, 0))
        self.file = self.socket.makefile("rwb")
        self.nonce = json.loads(self.file.readline())

    def say(self, line: bytes) -> bytes:
        self.file.write(line + b"\n")
        self.file.flush()
        return self.read()

    def read(self) -> bytes:
        try:
            return self.file.readline()
        except ConnectionResetError:
            return b""

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self.file, self.socket):
            with suppress(OSError):
                each.close()


@pytest.fixture
def rank_0(capfd: pytest.CaptureFixture[str]) -> Iterator[Meeting]:
    """A store that serves, which must not have printed anything in the end."""
    meeting = Meeting(0, 3, "127.0.0.1", free_port(), SECRET)
    server = _serve(meeting)
    yield meeting
    server.shutdown()
    server.server_close()
    assert capfd.readouterr().err == ""


def rank(number: int, of: Meeting) -> _Connection:
    return _Connection(Meeting(number, of.world, of.host, of.port, of.secret), 30)


def exchange(of: Meeting) -> None:
    """Two ranks enter and pass a value on."""
    one, other = rank(1, of), rank(2, of)
    one.ask("set", "0/key", "value")
    assert other.ask("get", "0/key", 10.0) == "value"
    one.close()
    other.close()


LINES = {
    "nothing": b"",
    "no JSON": b"GET / HTTP/1.1",
    "deep": b"[" * 60_000,
    "deep in its place": b'["enter", "1", ' + b"[" * 50_000,
    "a number that no float has": b'["get", "0/key", 1e999]',
    "a number of many digits": b'["get", "0/key", ' + b"9" * 4000 + b"]",
    "a rank that does not exist": b'["enter", "7", [3, ""]]',
    "a rank that is none": b'["enter", "one", [3, ""]]',
    "a rank of many digits": b'["enter", "' + b"9" * 50_000 + b'", [3, ""]]',
    "another digit than ASCII's": '["enter", "\u0661", [3, ""]]'.encode(),
    "no text": b"\xff\xfe",
    "a half of a pair": b'["set", "\\ud800", "x"]',
    "a value before it has entered": b'["set", "0/key", "stolen"]',
    "a question before it has entered": b'["get", "0/secret/rank 0", 0]',
    "an end before it has entered": b'["delete", "0/key"]',
    "too much": b"[" + b" " * (65 << 10),
    "an object": b'{"what": "enter"}',
}


@pytest.mark.parametrize("said", LINES)
def test_what_is_no_request_ends_one_connection_without_a_word(said: str, rank_0: Meeting) -> None:
    with Stranger(rank_0.port) as stranger:
        answer = stranger.say(LINES[said])
        assert answer == b"" or "is not that of rank 0" in json.loads(answer)
        assert stranger.read() == b""
    exchange(rank_0)


def test_a_stranger_without_the_secret_takes_no_rank(rank_0: Meeting) -> None:
    with Stranger(rank_0.port) as stranger:
        proof = store_module._proof("guessed", stranger.nonce, "1", 3)
        assert "GRADLANE_MEETING_SECRET" in json.loads(stranger.say(json.dumps(["enter", "1", [3, proof]]).encode()))
    with pytest.raises(MismatchError, match="rank 2: its GRADLANE_MEETING_SECRET is not that of rank 0"):
        _Connection(Meeting(2, 3, rank_0.host, rank_0.port, "another"), 30)
    exchange(rank_0)


def test_a_proof_that_was_heard_is_worth_nothing_on_another_connection(rank_0: Meeting) -> None:
    with Stranger(rank_0.port) as one, Stranger(rank_0.port) as other:
        heard = json.dumps(["enter", "1", [3, store_module._proof(SECRET, one.nonce, "1", 3)]]).encode()
        assert "GRADLANE_MEETING_SECRET" in json.loads(other.say(heard))
        assert json.loads(one.say(heard)) is None


def test_a_rank_that_leaves_before_it_has_said_anything_gives_its_place_back(rank_0: Meeting) -> None:
    first = rank(1, rank_0)
    with pytest.raises(MismatchError, match=r"another process is rank 1 already, at 127\.0\.0\.1"):
        rank(1, rank_0)
    first.close()
    deadline = time.monotonic() + 30
    while True:
        try:
            again = rank(1, rank_0)
            break
        except MismatchError:  # the store has not heard of the end yet
            assert time.monotonic() < deadline
    again.ask("set", "0/key", "value")
    again.close()
    with pytest.raises(MismatchError, match="rank 1 already"):
        rank(1, rank_0)


def test_strangers_of_one_address_keep_no_rank_out_and_get_a_thread_each_at_most_for_their_places(rank_0: Meeting) -> None:
    threads = threading.active_count()
    with ExitStack() as stack:
        honest = stack.enter_context(Stranger(rank_0.port))
        crowd = [stack.enter_context(Stranger(rank_0.port, "127.0.0.2")) for _ in range(3 * MAX_STRANGERS)]
        gone = crowd[: 2 * MAX_STRANGERS + 1]
        assert [stranger.read() for stranger in gone] == [b""] * len(gone)
        said = json.dumps(["enter", "1", [3, store_module._proof(SECRET, honest.nonce, "1", 3)]]).encode()
        assert json.loads(honest.say(said)) is None
        deadline = time.monotonic() + 30
        while threading.active_count() > threads + MAX_STRANGERS + 1:
            assert time.monotonic() < deadline


def test_a_rank_that_is_hung_up_on_before_it_has_entered_calls_again(rank_0: Meeting) -> None:
    def front(listener: socket.socket) -> None:
        for _ in range(3):
            listener.accept()[0].close()
        listener.close()
        servers.append(_serve(Meeting(0, 3, "127.0.0.1", port, SECRET)))

    servers: list[store_module._Server] = []
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    thread = threading.Thread(target=front, args=(listener,))
    thread.start()
    rank(1, Meeting(0, 3, "127.0.0.1", port, SECRET)).close()
    thread.join()
    servers[0].shutdown()
    servers[0].server_close()


def test_a_rank_stores_no_more_than_its_share(rank_0: Meeting) -> None:
    one, value = rank(1, rank_0), "x" * (60 << 10)
    for number in range(store_module._STORED_BYTES // len(value) - 1):
        one.ask("set", f"0/{number}", value)
    one.ask("set", "0/rest", "x" * (50 << 10))
    with pytest.raises(CommunicationError, match="cannot be reached any more"):
        one.ask("set", "0/more", value)
    one.close()


def test_a_wait_for_a_value_ends_whatever_time_is_asked_for(rank_0: Meeting) -> None:
    one = rank(1, rank_0)
    assert one.ask("get", "0/nothing", -1e300) is None
    one.ask("set", "0/key", "value")
    assert one.ask("get", "0/key", 1e300) == "value"
    one.close()


def test_who_calls_while_no_descriptor_is_free_is_hung_up_on(rank_0):
    with socket.socket() as caller:
        caller.settimeout(AT_ONCE_S)
        with no_descriptor_free():
            caller.connect((rank_0.host, rank_0.port))
            assert caller.recv(1) == b""
    with Stranger(rank_0.port):  # and one who calls later is heard
        pass
