"""How the ranks of a job find one another without torch: rank 0 serves a small store, and all ranks connect to it.

What goes through the store is small text: addresses and the job's secret, see `transport.formation`. Requests and answers are
one line of JSON each; nothing is evaluated. The store lives as long as rank 0's process, so that a script may meet again.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
import socketserver
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gradlane.errors import CommunicationError, InputError, MismatchError

_LINE_BYTES = 64 << 10
_VARIABLES = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"


@dataclass(frozen=True)
class Meeting:
    """Who this process is, and where rank 0 serves the job's store.

    Attributes:
        rank: of this process, from 0.
        world: number of ranks.
        host, port: of rank 0, as every rank reaches it.
    """

    rank: int
    world: int
    host: str
    port: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise InputError(f"rank: got {self.rank} of a world of {self.world}, expected 0 to {self.world - 1}")

    @staticmethod
    def of(environment: Mapping[str, str] = os.environ) -> Meeting:
        """The meeting that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe.

        Raises:
            InputError: a variable is missing or no number; or torchrun set them, whose own store has that port.
        """
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            raise InputError(
                "MASTER_PORT: it is of the store of torchrun or gradlane launch, expected a port that rank 0 can listen on; "
                f"start each rank by itself with {_VARIABLES}, or give a Meeting(rank, world, host, port)"
            )
        return Meeting(
            _number(environment, "RANK"),
            _number(environment, "WORLD_SIZE"),
            environment.get("MASTER_ADDR", "127.0.0.1"),
            _number(environment, "MASTER_PORT"),
        )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise InputError(f"{name}: got {text!r}, expected a number; set {_VARIABLES} for each rank, or give a Meeting")
    return int(text)


class Store:
    """One meeting's part of the job's store, with the methods of torch's that `transport.formation` uses.

    Args:
        meeting: the same on all ranks, but for the rank.
        timeout_s: seconds to wait for rank 0.

    Attributes:
        address: of this host, as rank 0 reaches it.

    Raises:
        InputError: rank 0 cannot listen there.
        CommunicationError: rank 0 did not come within `timeout_s`.
        MismatchError: the rank is taken, or ranks disagree on the world size.
    """

    def __init__(self, meeting: Meeting, timeout_s: float) -> None:
        self._connection = _connection(meeting, timeout_s)
        self._prefix = f"{next(self._connection.meetings)}/"
        self.address = self._connection.address

    def set(self, key: str, value: str) -> None:
        """Store `value`."""
        self._connection.ask("set", self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """The value of a key that was waited for."""
        return str(self._connection.ask("get", self._prefix + key, 0)).encode()

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Return when all keys have values. Raises `RuntimeError` after `timeout`, as torch's."""
        for key in keys:
            if self._connection.ask("get", self._prefix + key, timeout.total_seconds()) is None:
                raise RuntimeError(f"nothing came within {timeout.total_seconds():.0f} s")

    def delete_key(self, key: str) -> None:
        """Forget a value."""
        self._connection.ask("delete", self._prefix + key)


class _Connection:
    """A rank's connection with the store. One thread at a time uses it."""

    def __init__(self, meeting: Meeting, timeout_s: float) -> None:
        self.meetings = itertools.count()
        if meeting.rank == 0:
            self._server = _serve(meeting)
        self._socket = _connected(meeting, timeout_s)
        self._socket.settimeout(None)
        self._file = self._socket.makefile("rwb")
        self.address = str(self._socket.getsockname()[0])
        fault = self.ask("enter", str(meeting.rank), meeting.world)
        if fault is not None:
            self._file.close()
            self._socket.close()
            raise MismatchError(f"rank {meeting.rank}: {fault}")

    def ask(self, what: str, key: str, value: Any = None) -> Any:
        """The store's answer."""
        try:
            self._file.write(json.dumps([what, key, value]).encode() + b"\n")
            self._file.flush()
            line = self._file.readline()
        except OSError as error:
            raise CommunicationError(f"the store of rank 0 cannot be reached any more ({error}); is rank 0 gone?") from None
        if not line:
            raise CommunicationError("the store of rank 0 cannot be reached any more; is rank 0 gone?")
        return json.loads(line)


def _connected(meeting: Meeting, timeout_s: float) -> socket.socket:
    deadline = time.monotonic() + timeout_s
    reason = "it was not there"
    while time.monotonic() < deadline:
        try:
            connected = socket.create_connection((meeting.host, meeting.port), max(0.1, deadline - time.monotonic()))
            # where nobody listens yet, the kernel may give a caller on the same host the very port that it calls
            if connected.getsockname() != connected.getpeername():
                return connected
            connected.close()
        except OSError as error:
            reason = str(error)
        time.sleep(0.05)  # rank 0 does not listen yet: there is nothing to wait on
    raise CommunicationError(
        f"rank {meeting.rank}: no rank 0 at {meeting.host}:{meeting.port} within {timeout_s:.0f} s ({reason}); did it start, "
        "and are MASTER_ADDR and MASTER_PORT the same on all ranks?"
    )


@functools.cache
def _connection(meeting: Meeting, timeout_s: float) -> _Connection:
    return _Connection(meeting, timeout_s)


class _Server(socketserver.ThreadingTCPServer):
    """Rank 0's store: a dictionary, and a thread for each rank."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, meeting: Meeting) -> None:
        self.world = meeting.world
        self.values: dict[str, Any] = {}
        self.entered: set[str] = set()
        self.changed = threading.Condition()
        super().__init__((meeting.host, meeting.port), _Answers)

    def answer(self, what: str, key: str, value: Any) -> Any:
        """What is told to a rank that asks."""
        with self.changed:
            if what == "enter":
                return self._enter(key, value)
            if what == "get":
                self.changed.wait_for(lambda: key in self.values, value)
                return self.values.get(key)
            if what == "set":
                self.values[key] = value
                self.changed.notify_all()
            elif what == "delete":
                self.values.pop(key, None)
            return None

    def _enter(self, rank: str, world: int) -> str | None:
        if world != self.world:
            return f"ranks disagree on the world size: {self.world} on rank 0, {world} on rank {rank}"
        if rank in self.entered:
            return f"another process is rank {rank} already; give every process a rank of its own"
        self.entered.add(rank)
        return None


class _Answers(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        try:
            while line := self.rfile.readline(_LINE_BYTES):
                what, key, value = json.loads(line)
                self.wfile.write(json.dumps(self.server.answer(str(what), str(key), value)).encode() + b"\n")
        except (OSError, ValueError, TypeError):
            return  # a rank that is gone, or a stranger: the connection ends


def _serve(meeting: Meeting) -> _Server:
    try:
        server = _Server(meeting)
    except OSError as error:
        raise InputError(
            f"rank 0 cannot listen on {meeting.host}:{meeting.port} ({error}); expected a free port of this host, and one "
            "rank 0"
        ) from None
    threading.Thread(target=server.serve_forever, name="gradlane-store", daemon=True).start()
    return server
