"""How the ranks of a job find one another without torch: rank 0 serves a small store, and all ranks connect to it.

What goes through the store is small text: addresses and the job's secret, see `transport.formation`. Requests and answers are
one line of JSON each, of fixed types; nothing is evaluated. The store lives as long as rank 0's process, so that a script may
meet again.

Whoever connects is a stranger until it enters as a rank that is not there, and proves that it knows the meeting's secret
if there is one. Nothing else is answered before. A line that is no request ends that one connection. Strangers are few
(`transport.strangers`), and so is what each rank may store.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import ipaddress
import itertools
import json
import os
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import msgspec

from gradlane.errors import CommunicationError, InputError, MismatchError
from gradlane.transport.strangers import Reserve, is_out_of_descriptors, origin_of, who_makes_room

SECRET_VARIABLE = "GRADLANE_MEETING_SECRET"
_LINE_BYTES = 64 << 10
_STORED_BYTES = 4 << 20  # of one rank: some hundred bytes a meeting
_STRANGER_S = 60.0  # in which a stranger has to enter
_PAUSE_S = 0.1  # between two looks at a caller that cannot be taken off the queue
_MOST_S = 86_400.0  # that a rank may ask to wait for a value
_VARIABLES = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"


@dataclass(frozen=True)
class Meeting:
    """Who this process is, and where rank 0 serves the job's store.

    Attributes:
        rank: of this process, from 0.
        world: number of ranks.
        host, port: of rank 0, as every rank reaches it.
        secret: the same on all ranks. Without one, any process that reaches the port may enter as a missing rank.
    """

    rank: int
    world: int
    host: str
    port: int
    secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise InputError(f"rank: got {self.rank} of a world of {self.world}, expected 0 to {self.world - 1}")

    @staticmethod
    def of(environment: Mapping[str, str] = os.environ) -> Meeting:
        """The meeting that RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, if it is set, GRADLANE_MEETING_SECRET describe.

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
            environment.get(SECRET_VARIABLE, ""),
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
        store_address: of rank 0, as this host reaches it.

    Raises:
        InputError: rank 0 cannot listen there.
        CommunicationError: rank 0 did not come within `timeout_s`.
        MismatchError: the rank is taken, or ranks disagree on the world size or the secret.
    """

    def __init__(self, meeting: Meeting, timeout_s: float) -> None:
        self._connection = _connection(meeting, timeout_s)
        self._prefix = f"{next(self._connection.meetings)}/"
        self.address, self.store_address = self._connection.address, self._connection.store_address

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


def _proof(secret: str, nonce: str, rank: str, world: int) -> str:
    return hmac.digest(secret.encode(), f"{nonce} {rank} {world}".encode(), "sha256").hex()


class _Connection:
    """A rank's connection with the store. One thread at a time uses it."""

    def __init__(self, meeting: Meeting, timeout_s: float) -> None:
        self.meetings = itertools.count()
        if meeting.rank == 0:
            self._server = _serve(meeting)
        self._enter(meeting, timeout_s)
        self._socket.settimeout(None)
        self.address, self.store_address = (str(end[0]) for end in (self._socket.getsockname(), self._socket.getpeername()))

    def _enter(self, meeting: Meeting, timeout_s: float) -> None:
        """Connect and enter. A store that hangs up has too many strangers, so that this rank calls it again."""
        deadline = time.monotonic() + timeout_s
        rank, reason = str(meeting.rank), "it was not there"
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                self._socket = socket.create_connection((meeting.host, meeting.port), max(0.1, left_s))
                # where nobody listens yet, the kernel may give a caller on the same host the very port that it calls
                if self._socket.getsockname() != self._socket.getpeername():
                    self._file = self._socket.makefile("rwb")
                    nonce = str(self._answer())
                    fault = self.ask("enter", rank, [meeting.world, _proof(meeting.secret, nonce, rank, meeting.world)])
                    if fault is None:
                        return
                    self.close()
                    raise MismatchError(f"rank {meeting.rank}: {fault}")
                self._socket.close()
            except (OSError, ValueError, CommunicationError) as error:
                reason = str(error)
                self.close()
            time.sleep(0.05)  # rank 0 does not listen yet: there is nothing to wait on
        raise CommunicationError(
            f"rank {meeting.rank}: no rank 0 at {meeting.host}:{meeting.port} within {timeout_s:.0f} s ({reason}); did it "
            "start, and are MASTER_ADDR and MASTER_PORT the same on all ranks?"
        )

    def close(self) -> None:
        """End the connection, if there is one."""
        for each in ("_file", "_socket"):
            with contextlib.suppress(OSError, AttributeError):
                getattr(self, each).close()

    def ask(self, what: str, key: str, value: Any = None) -> Any:
        """The store's answer."""
        try:
            self._file.write(json.dumps([what, key, value]).encode() + b"\n")
            self._file.flush()
            return self._answer()
        except OSError as error:
            raise CommunicationError(f"the store of rank 0 cannot be reached any more ({error}); is rank 0 gone?") from None

    def _answer(self) -> Any:
        line = self._file.readline()
        if not line:
            raise CommunicationError("the store of rank 0 cannot be reached any more; is rank 0 gone?")
        return json.loads(line)


@functools.cache
def _connection(meeting: Meeting, timeout_s: float) -> _Connection:
    return _Connection(meeting, timeout_s)


class _Request(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    what: Literal["enter", "get", "set", "delete"]
    key: str
    value: str | float | tuple[int, str] | None = None


class _Server(socketserver.ThreadingTCPServer):
    """Rank 0's store: a dictionary, and a thread for each connection, few of them strangers'."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self._reserve = Reserve()
        self.values: dict[str, str] = {}
        self.entered: dict[int, str] = {}  # by rank: from where
        self.strangers: dict[_Answers, Hashable] = {}  # the oldest first; with their origins
        self.changed = threading.Condition()
        address = _listening_address(meeting)
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, meeting.port), _Answers)

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection. Where no descriptor is free, its caller is hung up on."""
        try:
            return super().get_request()
        except OSError as error:
            if is_out_of_descriptors(error) and not self._reserve.hang_up(self.socket):
                time.sleep(_PAUSE_S)
            raise

    def server_close(self) -> None:
        super().server_close()
        self._reserve.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a connection that breaks is of no interest here, and other errors end it."""

    def came(self, stranger: _Answers) -> None:
        """Somebody has connected: another one goes if there are too many."""
        origin = origin_of(str(stranger.client_address[0]))
        with self.changed:
            goes = who_makes_room(list(self.strangers.values()), origin)
            if goes is not None:
                leaves = list(self.strangers)[goes]
                del self.strangers[leaves]
                with contextlib.suppress(OSError):
                    leaves.connection.shutdown(socket.SHUT_RDWR)
            self.strangers[stranger] = origin

    def enter(self, stranger: _Answers, request: _Request, nonce: str) -> str | None:
        """Let a stranger in as a rank; why not, or None. Raises `ValueError` for what is no rank."""
        if request.what != "enter" or not isinstance(request.value, tuple) or not request.key.isdecimal():
            raise ValueError("a stranger")
        rank, (world, proof) = int(request.key[:9]), request.value
        if not hmac.compare_digest(proof.encode(), _proof(self.meeting.secret, nonce, request.key, world).encode()):
            return f"its {SECRET_VARIABLE} is not that of rank 0"
        if world != self.meeting.world:
            return f"ranks disagree on the world size: {self.meeting.world} on rank 0, {world} on rank {rank}"
        if not rank < world or str(rank) != request.key:
            raise ValueError("a rank that this job does not have")
        with self.changed:
            if rank in self.entered:
                return f"another process is rank {rank} already, at {self.entered[rank]}; give every process a rank of its own"
            if self.strangers.pop(stranger, None) is None:
                raise ValueError("it had to make room")
            self.entered[rank] = str(stranger.client_address[0])
        stranger.rank = rank
        return None

    def left(self, connection: _Answers) -> None:
        """A connection has ended. Whoever had entered and stored nothing gives its place back."""
        with self.changed:
            self.strangers.pop(connection, None)
            if connection.rank is not None and not connection.stored:
                self.entered.pop(connection.rank, None)

    def answer(self, rank: _Answers, request: _Request) -> str | None:
        """What is told to a rank that asks. Raises `ValueError` for what may not be asked."""
        key, value = request.key, request.value
        with self.changed:
            if request.what == "get" and isinstance(value, float):
                self.changed.wait_for(lambda: key in self.values, min(max(value, 0.0), _MOST_S))
                return self.values.get(key)
            if request.what == "set" and isinstance(value, str):
                rank.stored += len(key.encode()) + len(value.encode())
                if rank.stored > _STORED_BYTES:
                    raise ValueError("more than a rank may store")
                self.values[key] = value
                self.changed.notify_all()
            elif request.what == "delete" and value is None:
                self.values.pop(key, None)
            else:
                raise ValueError("no request")
            return None


class _Answers(socketserver.StreamRequestHandler):
    server: _Server
    rank: int | None = None
    stored = 0  # bytes

    def handle(self) -> None:
        requests = msgspec.json.Decoder(_Request, strict=False)
        nonce = secrets.token_hex(32)
        self.server.came(self)
        # a rank that is gone, or a stranger: the connection ends
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
            self.connection.settimeout(_STRANGER_S)
            self._say(nonce)
            while line := self.rfile.readline(_LINE_BYTES):
                request = requests.decode(line)
                if self.rank is None:
                    fault = self.server.enter(self, request, nonce)
                    self._say(fault)
                    if fault is not None:
                        return
                    self.connection.settimeout(None)
                else:
                    self._say(self.server.answer(self, request))

    def finish(self) -> None:
        self.server.left(self)
        super().finish()

    def _say(self, what: str | None) -> None:
        self.wfile.write(json.dumps(what).encode() + b"\n")


def _listening_address(meeting: Meeting) -> str:
    """Where rank 0 listens: at the address of its host. A host whose own name leads to loopback (Debian's 127.0.1.1) cannot
    know by which address the others reach it, and listens on all of them.
    """
    address = str(socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_STREAM)[0][4][0])
    is_own_name = meeting.host != "localhost" and meeting.host != address
    return "0.0.0.0" if is_own_name and ipaddress.ip_address(address.partition("%")[0]).is_loopback else address


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
