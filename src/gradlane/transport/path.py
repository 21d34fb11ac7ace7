"""Path: whether DSCP marks survive between hosts, and whether the network prioritizes by them.
IPv4.

One host listens, one or two send. Each sender sends datagrams of every DSCP, and the listener reads
which arrive (IP_RECVTOS). Then two TCP connections, one marked as a plan's most urgent lane and one
unmarked, send as fast as they can, and the listener measures both. With one sender they share its
own queue, with two the switch's port to the listener.

Input is untrusted: lines are short and typed, connections and datagrams carry the run's token, all
waits end.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections import defaultdict

import msgspec

from gradlane.core.fields import need, need_int
from gradlane.core.traffic_class import DSCP, TrafficClass, traffic_class_of
from gradlane.errors import CommunicationError

PATIENCE_S = 30.0
"""How long a host waits for another to begin."""
_WINS = 4  # times the other's rate; congestion control alone gives one of two equal connections up to about 1.5 times
_REPEATS = 8  # datagrams of each DSCP
_QUIET_S = 0.5  # without a datagram: no more are in flight
_WARM_S = 1.0  # until congestion control has settled
_MOST_LINE = 200
_TOKEN_BYTES = 8
_DATAGRAM_BYTES = _TOKEN_BYTES + 1
_MARKS = tuple(sorted(set(DSCP), reverse=True))


class Role(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the listener tells a sender: the run's token and its connections (True: marked)."""

    token: str
    flows: tuple[bool, ...]
    seconds: float


class PathReport(msgspec.Struct, frozen=True):
    """What a listener found.

    Attributes:
        arrived: for each DSCP sent, the DSCPs that its datagrams arrived with; empty: all were
            lost.
        marked_bytes_per_second, unmarked_bytes_per_second: of two concurrent connections.
    """

    senders: int
    arrived: dict[int, tuple[int, ...]]
    marked_bytes_per_second: int
    unmarked_bytes_per_second: int

    @property
    def survives(self) -> bool:
        """Whether every DSCP arrived as it was sent."""
        return all(came == (sent,) for sent, came in self.arrived.items())

    @property
    def wins(self) -> bool:
        """Whether the marked connection was served before the other."""
        return self.marked_bytes_per_second >= _WINS * self.unmarked_bytes_per_second


# -- the listener -----------------------------------------------------------------------------------------


def listen(address: str, port: int, senders: int = 2, seconds: float = 3.0) -> PathReport:
    """Wait for senders, and measure.

    Args:
        address, port: where to listen.
        senders: 1 or 2.
        seconds: how long to measure the two connections.

    Raises:
        CommunicationError: senders do not come, or leave early.
        InputError: an argument is out of range.
    """
    need_int("senders", senders, 1, 2)
    need(0 < seconds <= 60, "seconds", seconds, "up to 60")
    token = secrets.token_bytes(_TOKEN_BYTES)
    flows = ((True, False),) if senders == 1 else ((True,), (False,))
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(socket.create_server((address, port)))
            datagrams = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            datagrams.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
            datagrams.bind((address, port))
            server.settimeout(PATIENCE_S)
            controls = [stack.enter_context(server.accept()[0]) for _ in range(senders)]
            for control, its in zip(controls, flows, strict=True):
                control.settimeout(PATIENCE_S)
                control.sendall(msgspec.json.encode(Role(token.hex(), its, seconds)) + b"\n")
            for control in controls:
                _line(control)
            arrived = _read_marks(datagrams, token)
            for control in controls:
                control.sendall(b"go\n")
            connections = [_accept_flow(server, token, stack) for _ in range(2)]
            marked, unmarked = _rates(dict(connections), seconds)
        except OSError as error:
            raise CommunicationError(
                f"path: {error} while listening on {address}:{port}; do {senders} others run the check, and reach it?"
            ) from error
    return PathReport(senders, arrived, marked, unmarked)


def _read_marks(datagrams: socket.socket, token: bytes) -> dict[int, tuple[int, ...]]:
    came: dict[int, set[int]] = defaultdict(set)
    datagrams.settimeout(_QUIET_S)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            data, ancillary, _, _ = datagrams.recvmsg(_DATAGRAM_BYTES, socket.CMSG_SPACE(4))
        except TimeoutError:
            break
        if len(data) == _DATAGRAM_BYTES and data[:_TOKEN_BYTES] == token:
            came[data[-1]] |= {value[0] >> 2 for _, kind, value in ancillary if kind == socket.IP_TOS}
    return {sent: tuple(sorted(came[sent])) for sent in _MARKS}


def _accept_flow(server: socket.socket, token: bytes, stack: contextlib.ExitStack) -> tuple[bool, socket.socket]:
    while True:
        connection = stack.enter_context(server.accept()[0])
        connection.settimeout(PATIENCE_S)
        said = connection.recv(_TOKEN_BYTES + 1, socket.MSG_WAITALL)
        if said[:_TOKEN_BYTES] == token and len(said) == _TOKEN_BYTES + 1:
            return bool(said[-1]), connection


def _rates(connections: dict[bool, socket.socket], seconds: float) -> tuple[int, int]:
    received = dict.fromkeys(connections, 0)
    over = threading.Event()

    def receive(marked: bool, connection: socket.socket) -> None:
        into = bytearray(1 << 18)
        with contextlib.suppress(OSError):
            while (count := connection.recv_into(into)) and not over.is_set():
                received[marked] += count

    threads = [threading.Thread(target=receive, args=each, daemon=True) for each in connections.items()]
    for thread in threads:
        thread.start()
    time.sleep(_WARM_S)
    before, began = dict(received), time.monotonic()
    time.sleep(seconds)
    after, took = dict(received), time.monotonic() - began
    over.set()
    for connection in connections.values():
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RD)  # ends the threads' recv
    for thread in threads:
        thread.join(PATIENCE_S)
    for connection in connections.values():
        _reset(connection)
    marked, unmarked = (round((after[each] - before[each]) / took) for each in (True, False))
    return marked, unmarked


def _reset(connection: socket.socket) -> None:
    """End a connection so that its sender learns of it at once, also where its window is closed.

    After an orderly close a closed window stays closed. Linux announces no window for a connection that nobody reads from any
    more, and the sender would wait until its own timeout.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


# -- a sender ---------------------------------------------------------------------------------------------


def send(address: str, port: int) -> None:
    """Do what the listener at `address` asks for; return when it has measured.

    Raises:
        CommunicationError: the listener does not answer or leaves early.
    """
    try:
        with _connect(address, port) as control:
            role = msgspec.json.decode(_line(control), type=Role)
            token = bytes.fromhex(role.token)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
                for dscp in _MARKS * _REPEATS:
                    datagrams.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)
                    datagrams.sendto(token + bytes([dscp]), (address, port))
            control.sendall(b"sent\n")
            _line(control)
            threads = [
                threading.Thread(target=_flood, args=(address, port, token, marked, role.seconds)) for marked in role.flows
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    except (OSError, ValueError) as error:
        raise CommunicationError(f"path: {error} while sending to {address}:{port}; does the check listen there?") from error


def _connect(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection((address, port), timeout=PATIENCE_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _flood(address: str, port: int, token: bytes, marked: bool, seconds: float) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as flow:
        flow.settimeout(PATIENCE_S)
        if marked:
            put_mark(flow, traffic_class_of(0))
        flow.connect((address, port))
        flow.sendall(token + bytes([marked]))
        block = bytes(1 << 16)
        end = time.monotonic() + _WARM_S + min(seconds, 60.0) + PATIENCE_S
        while time.monotonic() < end:
            flow.send(block)  # until the listener closes


def put_mark(one: socket.socket, of: TrafficClass) -> None:
    """Mark what `one` sends from now on."""
    if one.family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, of.dscp << 2)
    with contextlib.suppress(OSError):  # of an address of version 6 there is none
        one.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, of.dscp << 2)
    # after IP_TOS, which sets a priority of its own
    one.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, of.socket_priority)


def _line(control: socket.socket) -> bytes:
    """What the other end says, up to the end of the line."""
    said = bytearray()
    while not said.endswith(b"\n"):
        one = control.recv(1)
        if not one or len(said) == _MOST_LINE:
            raise ConnectionError("the other end left, or says too much")
        said += one
    return bytes(said)
