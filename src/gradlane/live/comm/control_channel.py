"""ControlChannel: one small TCP connection from every rank to rank 0, apart from gradient traffic.

It carries what collectives cannot say: that a rank is alive (every `BEAT_S`), that it failed and
why, that it leaves in order, rank 0's choices and decisions, and the rolling hash of the messages
that a rank has issued. A dead process is noticed when the kernel closes its connection, and a
silent one after `stall_timeout`. A slow rank is not taken for a dead one, since a thread in native
code sends the beats, whatever Python does (`gradlane.transport.Heartbeat`). A beat says for how
long the sender's interpreter has not run; one line names a rank of which that is long. Rank 0
passes on what it learns, so that every rank ends with an error that names the same culprit.

Wire: each frame has a 16-byte little-endian header (magic, type, version, rank, length) and at most
`MAX_PAYLOAD` bytes of payload. Anything else closes that one connection. Nothing is unpickled or
evaluated. Whoever connects must send the job's token first; the token keeps jobs apart and is no
secret.

Each process has one thread in Python for this, which reads and on which the callbacks run.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any

from gradlane.errors import CommunicationError, JobError, OrderError, PeerDied, PeerError, PeerFailed, PeerStalled
from gradlane.live.backends.addresses import own_address
from gradlane.transport import Heartbeat

log = logging.getLogger("gradlane")

BEAT_S = 0.5
_END_S = 2.5  # how long `close` waits for a callback that runs
MAX_PAYLOAD = 16 * 1024  # bytes
MAX_STRANGERS = 64  # connections that have not sent the token yet
_HEADER = struct.Struct("<4sBBHII")  # magic, type, version, reserved, rank, payload bytes
_MAGIC = b"GLP1"
_VERSION = 2


class Frame(IntEnum):
    HELLO = 1  # token
    BEAT = 2  # milliseconds for which the sender's interpreter has not run (4 bytes)
    FAIL = 3  # kind (1 byte), culprit rank (4 bytes), text
    BYE = 4
    CHOICE = 5  # iteration (8 bytes), message (4 bytes)
    ISSUED = 6  # iteration (8 bytes), hash (8 bytes)
    DECISION = 7  # iteration (8 bytes), what rank 0 decided for it (4 bytes)
    BUFFERS = 8  # forward passes that have ended (8 bytes), why rank 0 sends its buffers (4 bytes)


_BEAT = struct.Struct("<I")
_PAIR = struct.Struct("<QI")
_HASH = struct.Struct("<QQ")
_FAIL = struct.Struct("<BI")


class _Cause(IntEnum):
    DIED = 1
    STALLED = 2
    RAISED = 3
    ORDER = 4
    OTHER = 5


def _header(frame: Frame, rank: int, payload_bytes: int) -> bytes:
    return _HEADER.pack(_MAGIC, frame, _VERSION, 0, rank, payload_bytes)


class _Connection:
    """One socket with its unread bytes. The channel's thread reads; any thread may send, by way of
    `heartbeat` once that knows the socket.
    """

    def __init__(self, sock: socket.socket, heartbeat: Heartbeat) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(BEAT_S)
        self.socket = sock
        self.rank: int | None = None  # known after HELLO
        # whoever has never been heard is not silent: rank 0 may not have come to it yet
        self.heard = math.inf
        self.said_bye = False
        self.was_slow = False  # its interpreter did not run for long, and one line has said so
        self._heartbeat = heartbeat
        self._unread = bytearray()

    def send(self, frame: Frame, rank: int, payload: bytes = b"") -> None:
        self._heartbeat.send(self.socket.fileno(), _header(frame, rank, len(payload)) + payload)

    def receive(self) -> list[tuple[Frame, int, bytes]]:
        """Read from the socket and return the frames that have arrived: type, rank, payload.

        Raises:
            OSError: the connection is broken or closed.
            ValueError: the peer sent something else than a frame.
        """
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
    """The control channel of one session, connected by the constructor (rank 0 waits for all).

    Args:
        store: a store of torch.distributed, through which ranks find rank 0.
        rank: of this process in the session's group.
        ranks: numbers of the group's ranks in the whole job, as errors and callbacks name them.
        timeout_s: seconds after which a rank that does not connect is an error.
        stall_timeout_s: seconds after which a rank that says nothing is an error.
        on_failure: called with an error if another rank is gone, stalled or failed, or if ranks
            issued messages in different orders.
        on_choice: called with an iteration and the message that is next in it, on ranks other
            than 0.
        on_left: called with a rank that has left in order.
        on_decision: called with an iteration and what rank 0 decided for it, on ranks other than 0.
        on_buffers: called with a number of forward passes and why rank 0 sends its buffers after
            them, on ranks other than 0.

    Raises:
        CommunicationError: ranks did not connect, or rank 0 cannot be reached.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: Sequence[int],
        timeout_s: float,
        stall_timeout_s: float,
        on_failure: Callable[[JobError], None],
        on_choice: Callable[[int, int], None],
        on_left: Callable[[int], None],
        on_decision: Callable[[int, int], None],
        on_buffers: Callable[[int, int], None] = lambda forward, why: None,
    ) -> None:
        self._rank, self._ranks, self._world = rank, ranks, len(ranks)
        self._timeout_s, self._stall_timeout_s = timeout_s, stall_timeout_s
        self._on_failure, self._on_choice, self._on_left, self._on_decision = on_failure, on_choice, on_left, on_decision
        self._on_buffers = on_buffers
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}  # by rank
        self._met: set[int] = set()  # rank 0: ranks that have connected, even if they left again
        self._strangers: list[_Connection] = []
        self._hashes: dict[int, dict[int, int]] = {}  # rank 0: iteration -> rank -> hash
        self._listener: socket.socket | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._closing = False
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._heartbeat = Heartbeat(_header(Frame.BEAT, rank, _BEAT.size), BEAT_S)
        try:
            if rank == 0:
                self._listen(store)
            else:
                self._connect(store)
        except BaseException:
            self._release()
            raise
        self._thread = threading.Thread(target=self._run, name="gradlane-peers", daemon=True)
        self._thread.start()
        _open.add(self)

    # -- meeting -----------------------------------------------------------------------------------

    def _listen(self, store: Any) -> None:
        token = secrets.token_hex(16)
        address = own_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=self._world + MAX_STRANGERS)
        self._token = token.encode()
        self._selector.register(self._listener, selectors.EVENT_READ)
        store.set("peers", f"{address} {self._listener.getsockname()[1]} {token}")
        deadline = time.monotonic() + self._timeout_s
        while len(self._met) < self._world - 1:
            if time.monotonic() > deadline:
                first, missing = self._ranks[0], [self._ranks[rank] for rank in range(1, self._world) if rank not in self._met]
                raise CommunicationError(
                    f"rank {first} listens on {address} for the control channel and ranks {missing} did not connect within "
                    f"{self._timeout_s:.0f} s; is that address reachable from them? (it is the one that leads to MASTER_ADDR)"
                )
            self._poll(0.2)

    def _connect(self, store: Any) -> None:
        try:
            store.wait(["peers"], timedelta(seconds=self._timeout_s))
            address, port, token = store.get("peers").decode().split()
            to_rank_0 = socket.create_connection((address, int(port)), timeout=self._timeout_s)
            to_rank_0.sendall(_header(Frame.HELLO, self._rank, len(token)) + token.encode())
        except (OSError, RuntimeError) as error:
            raise CommunicationError(
                f"rank {self._ranks[self._rank]} cannot reach the control channel of rank {self._ranks[0]}: {error}"
            ) from None
        connection = _Connection(to_rank_0, self._heartbeat)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._met_rank(0, connection)

    def _met_rank(self, rank: int, connection: _Connection) -> None:
        connection.rank = rank
        self._connections[rank] = connection
        self._heartbeat.add(connection.socket.fileno())

    # -- what the session says ---------------------------------------------------------------------

    def choose(self, iteration: int, message: int) -> None:
        """Tell the others that `message` is next in `iteration` (rank 0 only)."""
        self._say(Frame.CHOICE, iteration, message)

    def decide(self, iteration: int, what: int) -> None:
        """Tell the others that `what` is decided for `iteration` (rank 0 only)."""
        self._say(Frame.DECISION, iteration, what)

    def buffers(self, forward: int, why: int) -> None:
        """Tell the others that buffers will come in addition (rank 0 only).

        Args:
            forward: number of forward passes that have ended.
            why: an `Extra` of `session/module_buffers.py`.
        """
        self._say(Frame.BUFFERS, forward, why)

    def _say(self, frame: Frame, when: int, what: int) -> None:
        payload = _PAIR.pack(when, what)
        for connection in list(self._connections.values()):
            connection.send(frame, self._rank, payload)

    def issued(self, iteration: int, rolling_hash: int) -> None:
        """Report that this rank has issued all messages of `iteration`, in an order with this hash.

        Rank 0 compares the hashes of all ranks.
        """
        if self._rank == 0:
            self._compare(iteration, 0, rolling_hash)
        else:
            to_rank_0 = self._connections.get(0)
            if to_rank_0 is not None:  # else rank 0 is gone, as `on_failure` or `on_left` has told
                to_rank_0.send(Frame.ISSUED, self._rank, _HASH.pack(iteration, rolling_hash))

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank fails, and why.

        Nothing is sent if it fails because another rank is gone: rank 0 tells that.
        """
        if isinstance(error, PeerError):
            return
        kind = _Cause.ORDER if isinstance(error, OrderError) else _Cause.OTHER if isinstance(error, JobError) else _Cause.RAISED
        text = str(error) if isinstance(error, JobError) else f"{type(error).__name__}: {error}"
        self._broadcast_failure(kind, self._rank, text)

    def close(self) -> None:
        """Tell the others that this rank leaves, and end the thread.

        Any thread but the channel's own may call it, more than once.
        """
        if self._closing:
            return
        for connection in list(self._connections.values()):
            connection.send(Frame.BYE, self._rank)
        self._closing = True
        os.write(self._wake_write, b"x")
        self._thread.join(timeout=_END_S)
        self._release()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._listen_until_closed()
        except Exception as error:  # of a callback: the beats go on, and nobody else would hear of it
            failure = self._named(_Cause.RAISED, self._rank, f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            self.fail(error)
            self._on_failure(failure)

    def _listen_until_closed(self) -> None:
        next_look = time.monotonic()
        while not self._closing:
            now = time.monotonic()
            if now >= next_look:
                # if this thread itself was stopped for long, it must listen before it judges others
                if now - next_look > BEAT_S:
                    for connection in list(self._connections.values()):
                        connection.heard = max(connection.heard, now)
                next_look = now + BEAT_S
                self._look_for_silence(now)
            self._poll(max(0.0, next_look - time.monotonic()))

    def _poll(self, timeout_s: float) -> None:
        """Read what has come, or comes within `timeout_s`, which is at most `BEAT_S`."""
        self._heartbeat.lives()
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, _Connection):
                self._read(key.data)

    def _accept(self) -> None:
        assert self._listener is not None
        if len(self._strangers) >= MAX_STRANGERS:  # so many never sent HELLO: make room
            self._drop(self._strangers[0])
        try:
            connection = _Connection(self._listener.accept()[0], self._heartbeat)
        except OSError:  # it is gone again, or no descriptor is free: make room for ranks
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
        self._strangers.remove(connection)
        self._met_rank(rank, connection)

    def _handle(self, connection: _Connection, frame: Frame, rank: int, payload: bytes) -> None:
        assert connection.rank is not None
        if rank >= self._world:
            raise ValueError("a rank that this job does not have")
        if frame is Frame.BEAT:
            self._look_for_slowness(connection, connection.rank, _BEAT.unpack(payload)[0] / 1000)
        elif frame is Frame.FAIL:
            kind, culprit = _FAIL.unpack_from(payload)
            text = payload[_FAIL.size :].decode(errors="replace")
            if culprit >= self._world:
                raise ValueError("a rank that this job does not have")
            if self._rank == 0:
                self._broadcast_failure(_Cause(kind), culprit, text, skip=connection.rank)
            self._on_failure(self._named(_Cause(kind), culprit, text))
        elif frame is Frame.BYE:
            if self._rank == 0:  # the other ranks have no connection to the one that leaves
                rank = connection.rank
                for other in list(self._connections.values()):
                    if other is not connection:
                        other.send(Frame.BYE, rank)
            connection.said_bye |= rank == connection.rank
            self._on_left(self._ranks[rank])
        elif frame is Frame.CHOICE and connection.rank == 0:
            self._on_choice(*_PAIR.unpack(payload))
        elif frame is Frame.DECISION and connection.rank == 0:
            self._on_decision(*_PAIR.unpack(payload))
        elif frame is Frame.BUFFERS and connection.rank == 0:
            self._on_buffers(*_PAIR.unpack(payload))
        elif frame is Frame.ISSUED and self._rank == 0:
            iteration, rolling_hash = _HASH.unpack(payload)
            self._compare(iteration, connection.rank, rolling_hash)

    def _look_for_slowness(self, connection: _Connection, rank: int, not_run_s: float) -> None:
        # one rank says it, once: rank 0, or rank 1 about rank 0
        if not_run_s > self._stall_timeout_s and not connection.was_slow and self._rank <= 1:
            connection.was_slow = True
            log.warning(
                "gradlane: rank %d is alive, but its interpreter has not run for %.0f s (a long call that keeps Python's "
                "lock?): waiting for it, for up to %.0f s (timeout=)",
                self._ranks[rank],
                not_run_s,
                self._timeout_s,
            )

    def _look_for_silence(self, now: float) -> None:
        for rank, connection in list(self._connections.items()):
            if now - connection.heard > self._stall_timeout_s and not connection.said_bye:
                self._drop(connection)
                text = (
                    f"said nothing for {now - connection.heard:.1f} s and its connection is open: stopped or cut off; if it "
                    f"comes back by itself, raise stall_timeout= ({self._stall_timeout_s:g} s)"
                )
                self._broadcast_failure(_Cause.STALLED, rank, text)
                self._on_failure(self._named(_Cause.STALLED, rank, text))

    def _lost(self, rank: int) -> None:
        text = "its process ended, or its host closed the connection"
        self._broadcast_failure(_Cause.DIED, rank, text)
        self._on_failure(self._named(_Cause.DIED, rank, text))

    def _compare(self, iteration: int, rank: int, rolling_hash: int) -> None:
        of_iteration = self._hashes.setdefault(iteration, {})
        of_iteration[rank] = rolling_hash
        for other, hashed in of_iteration.items():
            if hashed != rolling_hash:
                text = (
                    f"ranks {self._ranks[other]} and {self._ranks[rank]} issued the messages of iteration {iteration} in "
                    f"different orders (hashes {hashed:016x} and {rolling_hash:016x}); sums of that iteration cannot be trusted"
                )
                self._broadcast_failure(_Cause.ORDER, rank, text)
                self._on_failure(self._named(_Cause.ORDER, rank, text))
                return
        if len(of_iteration) == self._world:
            del self._hashes[iteration]

    def _broadcast_failure(self, kind: _Cause, culprit: int, text: str, skip: int | None = None) -> None:
        payload = _FAIL.pack(kind, culprit) + text.encode()[: MAX_PAYLOAD - _FAIL.size]
        for rank, connection in list(self._connections.items()):
            if rank != skip:
                connection.send(Frame.FAIL, self._rank, payload)

    def _named(self, kind: _Cause, rank: int, text: str) -> JobError:
        return _failure(kind, self._ranks[rank], text)

    def _drop(self, connection: _Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        self._heartbeat.remove(connection.socket.fileno())
        connection.socket.close()
        if connection in self._strangers:
            self._strangers.remove(connection)
        if connection.rank is not None:
            self._connections.pop(connection.rank, None)

    def leave_to_parent(self) -> None:
        """In a forked child: take no part, and hold no connection open whose end would then be hidden."""
        self._closing = True
        self._close_sockets()

    def _release(self) -> None:
        self._heartbeat.close()
        self._close_sockets()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _close_sockets(self) -> None:
        for connection in [*self._connections.values(), *self._strangers]:
            connection.socket.close()
        if self._listener is not None:
            self._listener.close()


_open: weakref.WeakSet[ControlChannel] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for channel in list(_open):
        channel.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def _failure(kind: _Cause, rank: int, text: str) -> JobError:
    if kind is _Cause.DIED:
        return PeerDied(f"rank {rank} is gone: {text}", rank)
    if kind is _Cause.STALLED:
        return PeerStalled(f"rank {rank} is stalled: {text}", rank)
    if kind is _Cause.RAISED:
        return PeerFailed(f"rank {rank} failed: {text}", rank)
    if kind is _Cause.ORDER:
        return OrderError(text)  # the text names the ranks
    return PeerFailed(f"rank {rank} stopped: {text}", rank)
