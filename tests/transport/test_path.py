"""The check of a path's marks, over loopback: it reports what arrives, believes nobody and ends."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from gradlane.core.traffic_class import TrafficClass
from gradlane.errors import CommunicationError, InputError
from gradlane.transport import path
from gradlane.transport.path import PathReport
from tests.ports import free_port


def test_over_loopback_every_mark_arrives_as_sent_and_both_connections_move():
    port = free_port()
    sender = threading.Thread(target=path.send, args=("127.0.0.1", port))
    sender.start()
    found = path.listen("127.0.0.1", port, senders=1, seconds=0.2)
    sender.join(30)
    assert not sender.is_alive()
    assert found.arrived == {dscp: (dscp,) for dscp in (46, 34, 26, 18, 10, 0)}
    assert found.survives
    assert found.marked_bytes_per_second > 0
    assert found.unmarked_bytes_per_second > 0


def test_a_sender_before_a_closed_window_hears_at_once_that_the_check_is_over():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        reader, _ = server.accept()
        sender.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            while True:
                sender.send(bytes(1 << 16))
        sender.settimeout(20)
        path._reset(reader)
        with pytest.raises(ConnectionResetError):
            sender.send(b"one more")


@pytest.mark.parametrize(
    ("arrived", "survives"),
    [
        ({46: (46,), 0: (0,)}, True),
        ({46: (0,), 0: (0,)}, False),  # cleared on the way
        ({46: (8, 46), 0: (0,)}, False),  # on one of two ways
        ({46: (), 0: (0,)}, False),  # dropped
    ],
)
def test_marks_survive_where_each_comes_as_it_was_sent(arrived, survives):
    assert PathReport(2, arrived, 1, 1).survives is survives


def test_the_marked_connection_wins_where_it_gets_four_times_the_other():
    assert PathReport(2, {}, 400, 100).wins
    assert not PathReport(2, {}, 399, 100).wins


def test_a_sender_that_leaves_and_one_that_says_too_much_end_the_check():
    for said in (b"", b"x" * 1000):
        port, failures = free_port(), []

        def listen(port: int = port, failures: list[str] = failures) -> None:
            try:
                path.listen("127.0.0.1", port, senders=1)
            except CommunicationError as error:
                failures.append(str(error))

        listener = threading.Thread(target=listen)
        listener.start()
        with path._connect("127.0.0.1", port) as stranger:
            with contextlib.suppress(OSError):  # it may have hung up already
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
            listener.join(30)
        assert len(failures) == 1
        assert "the other end left, or says too much while listening on 127.0.0.1" in failures[0]


def test_arguments_of_no_use_are_refused():
    with pytest.raises(InputError, match="senders: got 3"):
        path.listen("127.0.0.1", 1, senders=3)
    with pytest.raises(InputError, match="seconds: got 0"):
        path.listen("127.0.0.1", 1, seconds=0)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_mark_is_in_the_header_and_in_the_hosts_own_queue(family):
    with socket.socket(family, socket.SOCK_STREAM) as one:
        path.put_mark(one, TrafficClass(46, 6))
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 6
        if family == socket.AF_INET6:
            assert one.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS) == 46 << 2
        else:
            assert one.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 46 << 2
