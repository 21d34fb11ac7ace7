"""ControlChannel: one small TCP connection from every rank to rank 0, apart from gradient traffic.

It carries what collectives cannot say: that a rank is alive (every `BEAT_S`), that it failed and
why, that it leaves in order, rank 0's choices and decisions, the rolling hash of the messages that
a rank has issued, and how long its steps take it. A dead process is noticed when the kernel closes its connection, and a
silent one after `stall_timeout`. A slow rank is not taken for a dead one, since a thread in native
code sends the beats, whatever Python does (`gradlane.transport.Heartbeat`). A beat says for how
long the sender's interpreter has not run; one line names a rank of which that is long. Rank 0
passes on what it learns, so that every rank ends with an error that names the same culprit.

What is no frame (`control_frames.py`) closes that one connection. Whoever connects must first send
the token of a rank that has not connected yet. Rank 0 draws one for each rank and hands it over
where they meet, when that rank is there to take it.

Each process has one thread in Python for this, which reads and on which the callbacks run.
"""

from __future__ import annotations

import contextlib
import itertools
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
from collections.abc import Callable, Iterator, Sequence

from gradlane.errors import CommunicationError, JobError, MismatchError, NotFiniteError, PeerError
from gradlane.live.backends.addresses import own_address
from gradlane.live.comm.control_frames import (
    BEAT,
    HASH,
    PAIR,
    TIMES,
    VERSION,
    Cause,
    Frame,
    Reader,
    failure_payload,
    header,
    not_finite_payload,
    read_failure,
    read_not_finite,
)  # fmt: skip
from gradlane.live.comm.roll_call import RollCall
from gradlane.live.comm.stragglers import Stragglers
from gradlane.transport import Heartbeat

log = logging.getLogger("gradlane")

BEAT_S = 0.5
_LOOKS_S = (0.005, 0.01, 0.02, 0.04, 0.1)  # between two looks for ranks that have not come, and on
_END_S = 2.5  # how long `close` waits for a callback that runs
MAX_STRANGERS = 64  # connections that have not sent the token yet


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
        self._reader = Reader()

    def send(self, frame: Frame, rank: int, payload: bytes = b"") -> None:
        self._heartbeat.send(self.socket.fileno(), header(frame, rank, len(payload)) + payload)

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
        return self._reader.frames(data)


class ControlChannel:
    """The control channel of one session, connected by the constructor (rank 0 waits for all).

    Args:
        roll: the roll call of the session's group, in which this rank takes part.
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
        on_not_finite: called with an iteration, the rank of the first gradient in it that rank 0
            has heard not to be finite, and the tensor's name; on all ranks.

    Raises:
        MismatchError: a rank did not come in time; on all ranks.
        CommunicationError: rank 0 cannot be reached.
        JobError: a rank that had come is gone, or has failed.
    """

    def __init__(
        self,
        roll: RollCall,
        ranks: Sequence[int],
        timeout_s: float,
        stall_timeout_s: float,
        on_failure: Callable[[JobError], None],
        on_choice: Callable[[int, int], None],
        on_left: Callable[[int], None],
        on_decision: Callable[[int, int], None],
        on_buffers: Callable[[int, int], None] = lambda forward, why: None,
        on_not_finite: Callable[[int, int, str], None] = lambda iteration, rank, name: None,
    ) -> None:
        self._rank, self._ranks, self._world = roll.rank, ranks, roll.world
        self._timeout_s, self._stall_timeout_s = timeout_s, stall_timeout_s
        self._on_failure, self._on_choice, self._on_left, self._on_decision = on_failure, on_choice, on_left, on_decision
        self._on_buffers, self._on_not_finite = on_buffers, on_not_finite
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}  # by rank
        self._met: set[int] = set()  # rank 0: ranks that have connected, even if they left again
        self._strangers: list[_Connection] = []
        self._tokens: dict[int, bytes] = {}  # rank 0: by rank, of those that have been called
        self._hashes: dict[int, dict[int, int]] = {}  # rank 0: iteration -> rank -> hash
        self._stragglers = Stragglers(ranks)  # rank 0
        self._last_not_finite = -1  # rank 0: iteration
        self._listener: socket.socket | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._closing = False
        self._failure: JobError | None = None  # the first that was found here or told
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._heartbeat = Heartbeat(header(Frame.BEAT, roll.rank, BEAT.size), BEAT_S)
        try:
            if roll.rank == 0:
                self._listen(roll)
            else:
                self._connect(roll)
        except BaseException as error:
            self.fail(error)
            self._release()
            raise
        self._thread = threading.Thread(target=self._run, name="gradlane-peers", daemon=True)
        self._thread.start()
        _open.add(self)

    # -- meeting -----------------------------------------------------------------------------------

    def _listen(self, roll: RollCall) -> None:
        address = own_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=self._world + MAX_STRANGERS)
        self._selector.register(self._listener, selectors.EVENT_READ)
        # before the first rank is called, so that each finds it there
        roll.store.set("peers", f"{VERSION} {address} {self._listener.getsockname()[1]}")
        deadline = time.monotonic() + self._timeout_s
        others = set(range(1, self._world))

        def is_over() -> bool:
            roll.call(others - self._met, self._new_token)
            return self._met == others or self._failure is not None or time.monotonic() > deadline

        self._attend(is_over, looks_s=itertools.chain(_LOOKS_S, itertools.repeat(_LOOKS_S[-1])))
        if self._met != others and self._failure is None:
            missing = [self._ranks[rank] for rank in sorted(others - self._met)]
            self._found(
                Cause.MISMATCH,
                0,
                f"{self._world - len(missing)} of {self._world} ranks called gradlane.attach within {self._timeout_s:.0f} s; "
                f"missing: {missing}; if they did, is rank {self._ranks[0]}'s address {address} reachable from them? (it is "
                "the one that leads to MASTER_ADDR)",
            )
        if self._failure is not None:
            raise self._failure

    def _new_token(self, rank: int) -> str:
        token = secrets.token_hex(16)
        self._tokens[rank] = token.encode()
        return token

    def _connect(self, roll: RollCall) -> None:
        me, first = self._ranks[self._rank], self._ranks[0]
        try:
            if not roll.wait_to_be_called(self._timeout_s):
                raise MismatchError(
                    f"rank {me}: no word from rank {first} within {self._timeout_s:.0f} s; it never called gradlane.attach, or "
                    "its process is gone"
                )
            version, address, port = roll.store.get("peers").decode().split()[:3]
            if int(version) != VERSION:
                raise MismatchError(
                    f"rank {first}'s control channel is of version {version}, rank {me}'s of {VERSION}: install one version "
                    "of gradlane everywhere"
                )
            to_rank_0 = socket.create_connection((address, int(port)), timeout=self._timeout_s)
            token = roll.take()
            to_rank_0.sendall(header(Frame.HELLO, self._rank, len(token)) + token)
        except (OSError, RuntimeError) as error:
            raise CommunicationError(f"rank {me} cannot reach the control channel of rank {first}: {error}") from None
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
        payload = PAIR.pack(when, what)
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
                to_rank_0.send(Frame.ISSUED, self._rank, HASH.pack(iteration, rolling_hash))

    def busy(self, window: int, times_us: Sequence[int]) -> None:
        """Report for how long this rank was busy in the steps of a window, see `stragglers.BusyTimes`.

        Rank 0 compares all ranks, and names those that slow the job.
        """
        if self._rank == 0:
            self._look_for_stragglers(0, window, times_us)
        else:
            to_rank_0 = self._connections.get(0)
            if to_rank_0 is not None:  # as in `issued`
                to_rank_0.send(Frame.BUSY, self._rank, TIMES.pack(window, *times_us))

    def not_finite(self, iteration: int, name: str) -> None:
        """Report that this rank's gradient of the tensor `name` is not finite.

        Rank 0 tells all ranks, itself too, of the first in an iteration.
        """
        if self._rank == 0:
            self._tell_not_finite(iteration, 0, name)
        else:
            to_rank_0 = self._connections.get(0)
            if to_rank_0 is not None:  # as in `issued`
                to_rank_0.send(Frame.NOT_FINITE, self._rank, not_finite_payload(iteration, self._rank, name))

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank fails, and why.

        Nothing is sent if it fails because another rank is gone: rank 0 tells that.
        """
        if self._closing or isinstance(error, PeerError):
            return
        text = str(error) if isinstance(error, JobError) else f"{type(error).__name__}: {error}"
        culprit = self._ranks.index(error.rank) if isinstance(error, NotFiniteError) else self._rank
        self._broadcast_failure(Cause.of(error), culprit, text)

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
            self._attend(lambda: self._closing)
        except Exception as error:  # of a callback: the beats go on, and nobody else would hear of it
            failure = self._named(Cause.RAISED, self._rank, f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            self.fail(error)
            self._fail_here(failure)

    def _attend(self, is_over: Callable[[], bool], looks_s: Iterator[float] | None = None) -> None:
        """Read, and look for silence, until `is_over`.

        Args:
            is_over: asked when something has come, and every `BEAT_S` at least.
            looks_s: seconds from each question to the next, at most.
        """
        next_look = time.monotonic()
        while not is_over():
            now = time.monotonic()
            if now >= next_look:
                # if this thread itself was stopped for long, it must listen before it judges others
                if now - next_look > BEAT_S:
                    for connection in list(self._connections.values()):
                        connection.heard = max(connection.heard, now)
                next_look = now + BEAT_S
                self._look_for_silence(now)
            left_s = max(0.0, next_look - time.monotonic())
            self._poll(left_s if looks_s is None else min(left_s, next(looks_s)))

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
        is_awaited = frame is Frame.HELLO and rank in self._tokens and rank not in self._met
        if not is_awaited or not secrets.compare_digest(payload, self._tokens[rank]):
            raise ValueError("a stranger")
        self._met.add(rank)
        self._strangers.remove(connection)
        self._met_rank(rank, connection)

    def _handle(self, connection: _Connection, frame: Frame, rank: int, payload: bytes) -> None:
        assert connection.rank is not None
        if rank >= self._world:
            raise ValueError("a rank that this job does not have")
        if frame is Frame.BEAT:
            self._look_for_slowness(connection, connection.rank, BEAT.unpack(payload)[0] / 1000)
        elif frame is Frame.FAIL:
            cause, culprit, text = read_failure(payload)
            if culprit >= self._world:
                raise ValueError("a rank that this job does not have")
            if self._rank == 0:
                self._broadcast_failure(cause, culprit, text, skip=connection.rank)
            self._fail_here(self._named(cause, culprit, text))
        elif frame is Frame.BYE:
            if self._rank == 0:  # the other ranks have no connection to the one that leaves
                rank = connection.rank
                for other in list(self._connections.values()):
                    if other is not connection:
                        other.send(Frame.BYE, rank)
            connection.said_bye |= rank == connection.rank
            self._on_left(self._ranks[rank])
        elif frame is Frame.CHOICE and connection.rank == 0:
            self._on_choice(*PAIR.unpack(payload))
        elif frame is Frame.DECISION and connection.rank == 0:
            self._on_decision(*PAIR.unpack(payload))
        elif frame is Frame.BUFFERS and connection.rank == 0:
            self._on_buffers(*PAIR.unpack(payload))
        elif frame is Frame.ISSUED and self._rank == 0:
            iteration, rolling_hash = HASH.unpack(payload)
            self._compare(iteration, connection.rank, rolling_hash)
        elif frame is Frame.BUSY and self._rank == 0:
            window, *times_us = TIMES.unpack(payload)
            self._look_for_stragglers(connection.rank, window, times_us)
        elif frame is Frame.NOT_FINITE:
            iteration, culprit, name = read_not_finite(payload)
            if self._rank == 0:
                self._tell_not_finite(iteration, connection.rank, name)
            elif culprit < self._world:
                self._on_not_finite(iteration, self._ranks[culprit], name)

    def _tell_not_finite(self, iteration: int, culprit: int, name: str) -> None:
        if iteration <= self._last_not_finite:
            return
        self._last_not_finite = iteration
        payload = not_finite_payload(iteration, culprit, name)
        for connection in list(self._connections.values()):
            connection.send(Frame.NOT_FINITE, self._rank, payload)
        self._on_not_finite(iteration, self._ranks[culprit], name)

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

    def _look_for_stragglers(self, rank: int, window: int, times_us: Sequence[int]) -> None:
        for straggler in self._stragglers.report(rank, window, times_us):
            log.warning("gradlane: %s", straggler)

    def _look_for_silence(self, now: float) -> None:
        for rank, connection in list(self._connections.items()):
            if now - connection.heard > self._stall_timeout_s and not connection.said_bye:
                self._drop(connection)
                text = (
                    f"said nothing for {now - connection.heard:.1f} s and its connection is open: stopped or cut off; if it "
                    f"comes back by itself, raise stall_timeout= ({self._stall_timeout_s:g} s)"
                )
                self._found(Cause.STALLED, rank, text)

    def _lost(self, rank: int) -> None:
        text = "its process ended, or its host closed the connection"
        self._found(Cause.DIED, rank, text)

    def _compare(self, iteration: int, rank: int, rolling_hash: int) -> None:
        of_iteration = self._hashes.setdefault(iteration, {})
        of_iteration[rank] = rolling_hash
        for other, hashed in of_iteration.items():
            if hashed != rolling_hash:
                text = (
                    f"ranks {self._ranks[other]} and {self._ranks[rank]} issued the messages of iteration {iteration} in "
                    f"different orders (hashes {hashed:016x} and {rolling_hash:016x}); sums of that iteration cannot be trusted"
                )
                self._found(Cause.ORDER, rank, text)
                return
        if len(of_iteration) == self._world:
            del self._hashes[iteration]

    def _found(self, cause: Cause, culprit: int, text: str) -> None:
        """A failure was found here: tell the other ranks, then the session."""
        self._broadcast_failure(cause, culprit, text)
        self._fail_here(self._named(cause, culprit, text))

    def _fail_here(self, error: JobError) -> None:
        self._failure = self._failure or error
        self._on_failure(error)

    def _broadcast_failure(self, cause: Cause, culprit: int, text: str, skip: int | None = None) -> None:
        payload = failure_payload(cause, culprit, text)
        for rank, connection in list(self._connections.items()):
            if rank != skip:
                connection.send(Frame.FAIL, self._rank, payload)

    def _named(self, cause: Cause, rank: int, text: str) -> JobError:
        return cause.error(self._ranks[rank], text)

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
