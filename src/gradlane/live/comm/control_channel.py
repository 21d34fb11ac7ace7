"""Peers: one small connection from every rank to rank 0, apart from the traffic of gradients.

It carries what collectives cannot say: I am alive (every half second), I failed and why, I leave, start this
message next (a coordinator's choice), and the rolling hash of what a rank has issued. A dead process is
noticed when the kernel closes its connection, a silent one after `SILENCE_S`; slow is not dead, since the
beats come from a thread of their own. Rank 0 tells all others what it learns, so every rank ends with an
error that names the same culprit.

Wire: frames of a fixed 16-byte little-endian header (magic, type, version, rank, length) and at most
`MAX_PAYLOAD` bytes. Anything else closes that one connection. Nothing is unpickled or evaluated. Whoever
connects must send the job's token first; the token keeps jobs apart, it is no secret.

Owns one thread a process. The callbacks run on that thread.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import Any

from gradlane.errors import CommunicationError, JobError, OrderError, PeerDied, PeerError, PeerFailed, PeerStalled
from gradlane.live.backends.addresses import own_address

BEAT_S = 0.5
SILENCE_S = 2.5
MAX_PAYLOAD = 16 * 1024
MAX_STRANGERS = 64
_HEADER = struct.Struct("<4sBBHII")  # magic, type, version, reserved, rank, payload bytes
_MAGIC = b"GLP1"
_VERSION = 1


class Frame(IntEnum):
    HELLO = 1  # token
    BEAT = 2
    FAIL = 3  # kind (1 byte), culprit rank (4 bytes), text
    BYE = 4
    CHOICE = 5  # iteration (8 bytes), message (4 bytes)
    ISSUED = 6  # iteration (8 bytes), hash (8 bytes)
    DECISION = 7  # iteration (8 bytes), what rank 0 decided for it (4 bytes)
    BUFFERS = 8  # forward passes that have ended (8 bytes), why rank 0 sends its buffers now (4 bytes)


_PAIR = struct.Struct("<QI")
_HASH = struct.Struct("<QQ")
_FAIL = struct.Struct("<BI")


class _Cause(IntEnum):
    DIED = 1
    STALLED = 2
    RAISED = 3
    ORDER = 4
    OTHER = 5


class _Connection:
    """One socket with its unread bytes; writes are whole frames under a lock."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(SILENCE_S)
        self.socket = sock
        self.rank: int | None = None  # known after HELLO
        self.heard = time.monotonic()
        self.said_bye = False
        self._unread = bytearray()
        self._lock = threading.Lock()

    def send(self, frame: Frame, rank: int, payload: bytes = b"") -> None:
        data = _HEADER.pack(_MAGIC, frame, _VERSION, 0, rank, len(payload)) + payload
        with contextlib.suppress(OSError), self._lock:  # a broken connection is noticed by its reader
            self.socket.sendall(data)

    def receive(self) -> list[tuple[Frame, int, bytes]]:
        """Frames that have arrived. Raises OSError or ValueError when the connection is of no more use."""
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionResetError("closed by peer")
        self.heard = time.monotonic()
        self._unread += data
        frames = []
        while len(self._unread) >= _HEADER.size:
            magic, kind, version, _, rank, length = _HEADER.unpack_from(self._unread)
            if magic != _MAGIC or version != _VERSION or length > MAX_PAYLOAD:
                raise ValueError("not a frame of gradlane's control channel")
            if len(self._unread) < _HEADER.size + length:
                break
            frames.append((Frame(kind), rank, bytes(self._unread[_HEADER.size : _HEADER.size + length])))
            del self._unread[: _HEADER.size + length]
        return frames


class ControlChannel:
    """The control channel of one session.

    on_failure(error): another rank is gone or asked all to stop. on_choice(iteration, message): the
    coordinator's order (never on rank 0). on_left(rank): it said goodbye. on_decision(iteration, what): rank 0's decision
    on an iteration to come (never on rank 0). on_buffers(forward, why): rank 0 sends its buffers out of turn (likewise).
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        timeout_s: float,
        on_failure: Callable[[JobError], None],
        on_choice: Callable[[int, int], None],
        on_left: Callable[[int], None],
        on_decision: Callable[[int, int], None],
        on_buffers: Callable[[int, int], None] = lambda forward, why: None,
    ) -> None:
        self._rank, self._world = rank, world
        self._on_failure, self._on_choice, self._on_left, self._on_decision = on_failure, on_choice, on_left, on_decision
        self._on_buffers = on_buffers
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}  # by rank
        self._met: set[int] = set()  # rank 0: who has come, were it to leave again at once
        self._strangers: list[_Connection] = []
        self._hashes: dict[int, dict[int, int]] = {}  # rank 0: iteration -> rank -> hash
        self._listener: socket.socket | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._closing = False
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        if rank == 0:
            self._listen(store, timeout_s)
        else:
            self._connect(store, timeout_s)
        self._thread = threading.Thread(target=self._run, name="gradlane-peers", daemon=True)
        self._thread.start()

    # -- meeting -------------------------------------------------------------------------------------

    def _listen(self, store: Any, timeout_s: float) -> None:
        token = secrets.token_hex(16)
        address = own_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=self._world + MAX_STRANGERS)
        self._token = token.encode()
        self._selector.register(self._listener, selectors.EVENT_READ)
        store.set("peers", f"{address} {self._listener.getsockname()[1]} {token}")
        deadline = time.monotonic() + timeout_s
        while len(self._met) < self._world - 1:
            if time.monotonic() > deadline:
                missing = sorted(set(range(1, self._world)) - self._met)
                self._release()
                raise CommunicationError(
                    f"rank 0 listens on {address} for the control channel and ranks {missing} did not connect within "
                    f"{timeout_s:.0f} s; is that address reachable from them? (it is the one that leads to MASTER_ADDR)"
                )
            self._poll(0.2)

    def _connect(self, store: Any, timeout_s: float) -> None:
        try:
            store.wait(["peers"], timedelta(seconds=timeout_s))
            address, port, token = store.get("peers").decode().split()
            connection = _Connection(socket.create_connection((address, int(port)), timeout=timeout_s))
        except (OSError, RuntimeError) as error:
            self._release()
            raise CommunicationError(f"rank {self._rank} cannot reach the control channel of rank 0: {error}") from None
        connection.rank = 0
        connection.send(Frame.HELLO, self._rank, token.encode())
        self._connections[0] = connection
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    # -- what the session says -------------------------------------------------------------------------

    def choose(self, iteration: int, message: int) -> None:
        """Coordinator: `message` is next, for everybody."""
        self._say(Frame.CHOICE, iteration, message)

    def decide(self, iteration: int, what: int) -> None:
        """Rank 0: `what` is decided for `iteration`, for everybody."""
        self._say(Frame.DECISION, iteration, what)

    def buffers(self, forward: int, why: int) -> None:
        """Rank 0: its buffers will come out of turn, to everybody."""
        self._say(Frame.BUFFERS, forward, why)

    def _say(self, frame: Frame, when: int, what: int) -> None:
        payload = _PAIR.pack(when, what)
        for connection in list(self._connections.values()):
            connection.send(frame, self._rank, payload)

    def issued(self, iteration: int, rolling_hash: int) -> None:
        """All messages of `iteration` have been issued, in an order with this hash."""
        if self._rank == 0:
            self._compare(iteration, 0, rolling_hash)
        else:
            to_rank_0 = self._connections.get(0)
            if to_rank_0 is not None:  # else it is gone, of which `on_failure` or `on_left` tells
                to_rank_0.send(Frame.ISSUED, self._rank, _HASH.pack(iteration, rolling_hash))

    def fail(self, error: BaseException) -> None:
        """Tell everybody that this rank fails, and why; that another one is gone they know from rank 0."""
        if isinstance(error, PeerError):
            return
        kind = _Cause.ORDER if isinstance(error, OrderError) else _Cause.OTHER if isinstance(error, JobError) else _Cause.RAISED
        text = str(error) if isinstance(error, JobError) else f"{type(error).__name__}: {error}"
        self._broadcast_failure(kind, self._rank, text)

    def close(self) -> None:
        """Say goodbye and end the thread. May be called twice, and from any thread but its own."""
        if self._closing:
            return
        for connection in list(self._connections.values()):
            connection.send(Frame.BYE, self._rank)
        self._closing = True
        os.write(self._wake_write, b"x")
        self._thread.join(timeout=SILENCE_S)
        self._release()

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        next_beat = time.monotonic()
        while not self._closing:
            now = time.monotonic()
            if now >= next_beat:
                # a thread that was itself stopped for long must listen before it judges
                late = now - next_beat > BEAT_S
                next_beat = now + BEAT_S
                for connection in list(self._connections.values()):
                    connection.send(Frame.BEAT, self._rank)
                    if late:
                        connection.heard = now
                self._look_for_silence(now)
            self._poll(max(0.0, next_beat - time.monotonic()))

    def _poll(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, _Connection):
                self._read(key.data)

    def _accept(self) -> None:
        assert self._listener is not None
        if len(self._strangers) >= MAX_STRANGERS:  # so many that never said HELLO: make room
            self._drop(self._strangers[0])
        try:
            connection = _Connection(self._listener.accept()[0])
        except OSError:  # gone again already, or no descriptor is free: the others must not suffer for it
            for stranger in list(self._strangers):
                self._drop(stranger)
            return
        self._strangers.append(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            for frame, rank, payload in connection.receive():
                if connection.rank is None:
                    self._greet(connection, frame, rank, payload)
                else:
                    self._handle(connection, frame, rank, payload)
        except (OSError, ValueError, struct.error):
            self._drop(connection)
            if connection.rank is not None and not connection.said_bye and not self._closing:
                self._lost(connection.rank)

    def _greet(self, connection: _Connection, frame: Frame, rank: int, payload: bytes) -> None:
        known = frame is Frame.HELLO and secrets.compare_digest(payload, self._token)
        if not known or not 0 < rank < self._world or rank in self._met:
            raise ValueError("a stranger")
        self._met.add(rank)
        connection.rank = rank
        self._strangers.remove(connection)
        self._connections[rank] = connection

    def _handle(self, connection: _Connection, frame: Frame, rank: int, payload: bytes) -> None:
        assert connection.rank is not None
        if frame is Frame.FAIL:
            kind, culprit = _FAIL.unpack_from(payload)
            text = payload[_FAIL.size :].decode(errors="replace")
            if self._rank == 0:
                self._broadcast_failure(_Cause(kind), culprit, text, skip=connection.rank)
            self._on_failure(_failure(_Cause(kind), culprit, text))
        elif frame is Frame.BYE:
            if self._rank == 0:  # each rank knows rank 0 alone
                rank = connection.rank
                for other in list(self._connections.values()):
                    if other is not connection:
                        other.send(Frame.BYE, rank)
            connection.said_bye |= rank == connection.rank
            self._on_left(rank)
        elif frame is Frame.CHOICE and connection.rank == 0:
            self._on_choice(*_PAIR.unpack(payload))
        elif frame is Frame.DECISION and connection.rank == 0:
            self._on_decision(*_PAIR.unpack(payload))
        elif frame is Frame.BUFFERS and connection.rank == 0:
            self._on_buffers(*_PAIR.unpack(payload))
        elif frame is Frame.ISSUED and self._rank == 0:
            iteration, rolling_hash = _HASH.unpack(payload)
            self._compare(iteration, connection.rank, rolling_hash)

    def _look_for_silence(self, now: float) -> None:
        for rank, connection in list(self._connections.items()):
            if now - connection.heard > SILENCE_S and not connection.said_bye:
                self._drop(connection)
                text = f"said nothing for {now - connection.heard:.1f} s and its connection is open: stopped or cut off"
                self._broadcast_failure(_Cause.STALLED, rank, text)
                self._on_failure(_failure(_Cause.STALLED, rank, text))

    def _lost(self, rank: int) -> None:
        text = "its process ended, or its host closed the connection"
        self._broadcast_failure(_Cause.DIED, rank, text)
        self._on_failure(_failure(_Cause.DIED, rank, text))

    def _compare(self, iteration: int, rank: int, rolling_hash: int) -> None:
        of_iteration = self._hashes.setdefault(iteration, {})
        of_iteration[rank] = rolling_hash
        for other, hashed in of_iteration.items():
            if hashed != rolling_hash:
                text = (
                    f"ranks {other} and {rank} issued the messages of iteration {iteration} in different orders "
                    f"(hashes {hashed:016x} and {rolling_hash:016x}); sums of that iteration cannot be trusted"
                )
                self._broadcast_failure(_Cause.ORDER, rank, text)
                self._on_failure(_failure(_Cause.ORDER, rank, text))
                return
        if len(of_iteration) == self._world:
            del self._hashes[iteration]

    def _broadcast_failure(self, kind: _Cause, culprit: int, text: str, skip: int | None = None) -> None:
        payload = _FAIL.pack(kind, culprit) + text.encode()[: MAX_PAYLOAD - _FAIL.size]
        for rank, connection in list(self._connections.items()):
            if rank != skip:
                connection.send(Frame.FAIL, self._rank, payload)

    def _drop(self, connection: _Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection in self._strangers:
            self._strangers.remove(connection)
        if connection.rank is not None:
            self._connections.pop(connection.rank, None)

    def _release(self) -> None:
        for connection in [*self._connections.values(), *self._strangers]:
            connection.socket.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _failure(kind: _Cause, rank: int, text: str) -> JobError:
    if kind is _Cause.DIED:
        return PeerDied(f"rank {rank} is gone: {text}", rank)
    if kind is _Cause.STALLED:
        return PeerStalled(f"rank {rank} is stalled: {text}", rank)
    if kind is _Cause.RAISED:
        return PeerFailed(f"rank {rank} failed: {text}", rank)
    if kind is _Cause.ORDER:
        return OrderError(text)  # which says of whom
    return PeerFailed(f"rank {rank} stopped: {text}", rank)
