"""ControlChannel: one small TCP connection from every rank to rank 0, apart from gradient traffic.

It carries what collectives cannot say: that a rank is alive (every `BEAT_S`), that it failed and why,
or that it leaves in order. It also carries rank 0's choices and decisions, the rolling hash of the
messages that a rank has issued, and how long its steps take it. A dead process is noticed when the
kernel closes its connection, and a silent one after `stall_timeout`. A slow rank is not taken for a
dead one, since a thread in native code sends the beats, whatever Python does
(`gradlane.transport.Heartbeat`). A beat says for how long the sender's interpreter has not run; if
that is long, one line names the rank. Rank 0 passes on what it learns, so that every rank ends with
an error that names the same culprit.

`control_protocol.py` decides; this module owns the sockets, the clock and the thread. Each session
has one such thread in Python, which reads frames and runs the callbacks.

A malformed frame (`control_frames.py`) closes only the connection it came on. A connection must
first send the token of a rank that has not connected yet. Rank 0 draws a token for each rank and
hands it over where they meet, when that rank is there to take it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

from gradlane.errors import CommunicationError, JobError, MismatchError
from gradlane.live.backends.addresses import INTERFACE_VARIABLE, own_address
from gradlane.live.comm.control_actions import Action, Drop, Keep, Send, Subject, Tell, Warn
from gradlane.live.comm.control_frames import BEAT, VERSION, Frame, Reader, header
from gradlane.live.comm.control_protocol import BEAT_S, LAST_WORDS_S, ControlProtocol
from gradlane.live.comm.long_waits import SAY_S, Timer, saying
from gradlane.live.comm.roll_call import RollCall
from gradlane.live.comm.stragglers import Slowest
from gradlane.transport import Heartbeat
from gradlane.transport.formation import is_loopback
from gradlane.transport.strangers import MAX_STRANGERS, Reserve, is_out_of_descriptors, origin_of

log = logging.getLogger("gradlane")

_LOOKS_S = (0.005, 0.01, 0.02, 0.04, 0.1)  # between two looks for ranks that have not come, and on
_END_S = 2.5  # how long `close` waits for a callback that runs


def _looks() -> Iterator[float]:
    return itertools.chain(_LOOKS_S, itertools.repeat(_LOOKS_S[-1]))


class _Connection:
    """One socket with its unread bytes, which the channel's thread reads."""

    def __init__(self, sock: socket.socket) -> None:
        self.has_heard = False
        self.use(sock)

    def use(self, sock: socket.socket) -> None:
        """Read from `sock` from now on."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(BEAT_S)
        self.socket = sock
        self._reader = Reader()

    def receive(self) -> list[tuple[Frame, int, bytes]]:
        """Read from the socket and return the frames that have arrived: type, rank, payload.

        Raises:
            OSError: the connection is broken or closed.
            ValueError: the peer sent something else than a frame.
        """
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionResetError("closed by peer")
        self.has_heard = True
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
        on_left: called with a rank that has left in order, and why if an exception made it leave.
        on_decision: called with an iteration and what rank 0 decided for it, on ranks other than 0.
        on_buffers: called with a number of forward passes and what rank 0 says of its buffers after
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
        on_left: Callable[[int, JobError | None], None],
        on_decision: Callable[[int, int], None],
        on_buffers: Callable[[int, int], None] = lambda forward, word: None,
        on_not_finite: Callable[[int, int, str], None] = lambda iteration, rank, name: None,
    ) -> None:
        self._rank, self._ranks, self._timeout_s = roll.rank, ranks, timeout_s
        self._call_by = time.monotonic() + timeout_s
        self._callbacks: dict[Subject, Callable[..., None]] = {
            "failure": on_failure,
            "choice": on_choice,
            "left": on_left,
            "decision": on_decision,
            "buffers": on_buffers,
            "not_finite": on_not_finite,
        }
        self._selector = selectors.DefaultSelector()
        self._listeners: dict[str, socket.socket] = {}  # rank 0: by address
        self._reserve = Reserve()
        self._wake_read, self._wake_write = os.pipe()
        self._closing = False
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._heartbeat = Heartbeat(header(Frame.BEAT, roll.rank, BEAT.size), BEAT_S)
        # Guards the protocol, and with it the order of frames. Reentrant, since a signal's handler may fail or close the
        # session. No callback runs under it: they take locks under which this channel is called.
        self._lock = threading.RLock()
        self._protocol: ControlProtocol[_Connection] = ControlProtocol(
            roll.rank, ranks, timeout_s, stall_timeout_s, time.monotonic()
        )
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
        protocol, address = self._protocol, own_address()
        # before the first rank is called, so that each finds it there
        roll.store.set("peers", self._listener_at(address, roll.world))
        deadline = time.monotonic() + self._timeout_s
        lines = Timer(time.monotonic(), SAY_S)

        def hand(rank: int) -> str:
            way = roll.way(rank)
            if is_loopback(address) and way and not is_loopback(way):  # it is on another host
                roll.store.set(f"peers/{rank}", self._listener_at(way, roll.world))
            return protocol.token_for(rank)

        def is_over() -> bool:
            if protocol.failure is None:
                roll.call(protocol.missing, hand)
            if (waited_s := lines.due(time.monotonic())) is not None:
                missing = [self._ranks[rank] for rank in sorted(protocol.missing)]
                log.warning(
                    "gradlane: rank %d waits for ranks %s to call gradlane.attach (with --ddp: to train on after a step), "
                    "for %.0f s now, for up to %.0f s (timeout=)",
                    self._ranks[0],
                    missing,
                    waited_s,
                    self._timeout_s,
                )
            return not protocol.missing or protocol.failure is not None or time.monotonic() > deadline

        self._attend(is_over, _looks())
        if protocol.missing and protocol.failure is None:
            left = roll.left(protocol.missing)
            self._do(lambda: protocol.give_up_waiting(address, left))
        if protocol.failure is not None:
            # who has been called and is on its way would take the end of this process for the cause
            until = time.monotonic() + LAST_WORDS_S
            self._attend(lambda: not protocol.on_their_way or time.monotonic() > until, _looks())
            raise protocol.failure

    def _listener_at(self, address: str, world: int) -> str:
        """Listen on an address of this host, if rank 0 does not yet; what it says of that to other ranks."""
        if address not in self._listeners:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                listener = socket.create_server((address, 0), family=family, backlog=world + MAX_STRANGERS)
            except OSError as error:
                raise CommunicationError(
                    f"rank {self._ranks[0]} cannot listen on {address} ({error}), at which other ranks would reach it; name an "
                    f"interface by {INTERFACE_VARIABLE}"
                ) from None
            self._selector.register(listener, selectors.EVENT_READ, listener)
            self._listeners[address] = listener
        return f"{VERSION} {address} {self._listeners[address].getsockname()[1]}"

    def _connect(self, roll: RollCall) -> None:
        me, first = self._ranks[self._rank], self._ranks[0]
        try:
            with saying(f"rank {me} waits for rank {first} to call gradlane.attach") if self._rank == 1 else nullcontext():
                is_called = roll.wait_to_be_called(self._timeout_s)
            if not is_called:
                raise MismatchError(
                    f"rank {me}: no word from rank {first} within {self._timeout_s:.0f} s; it never called gradlane.attach, or "
                    "its process is gone"
                )
            own = f"peers/{self._rank}"
            version, address, port = roll.store.get(own if roll.store.check([own]) else "peers").decode().split()[:3]
            if int(version) != VERSION:
                raise MismatchError(
                    f"rank {first}'s control channel is of version {version}, rank {me}'s of {VERSION}: install one version "
                    "of gradlane everywhere"
                )
            self._rank_0 = address, int(port)
            token = roll.take()
            self._hello = header(Frame.HELLO, self._rank, len(token)) + token
            connection = _Connection(self._called(self._timeout_s))
        except (OSError, RuntimeError) as error:
            raise CommunicationError(f"rank {me} cannot reach the control channel of rank {first}: {error}") from None
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._do(lambda: self._protocol.connected(connection))

    def _called(self, timeout_s: float) -> socket.socket:
        """A connection to rank 0 that begins with this rank's token."""
        to_rank_0 = socket.create_connection(self._rank_0, timeout_s)
        to_rank_0.sendall(self._hello)
        return to_rank_0

    def _call_again(self, connection: _Connection) -> bool:
        """Call rank 0 again if it has hung up before it said a word: it had too many strangers, or no descriptor.

        Returns:
            Whether rank 0 has taken the call.
        """
        if self._rank == 0 or connection.has_heard or time.monotonic() > self._call_by:
            return False
        time.sleep(_LOOKS_S[-1])  # others call, too
        try:
            again = self._called(_END_S)  # this thread has to hear that the channel closes
        except OSError:
            return False
        with self._lock:
            if self._closing:
                again.close()
            else:
                self._drop(connection)
                connection.use(again)
                self._selector.register(again, selectors.EVENT_READ, connection)
                self._keep(connection)
        return True

    # -- what the session says ---------------------------------------------------------------------

    def say(self, frame: Frame, when: int, what: int) -> None:
        """Tell the others what rank 0 has decided (rank 0 only).

        Args:
            frame: CHOICE, DECISION or BUFFERS.
            when, what: its payload: an iteration, and the message that is next in it or what is decided for it; or a number of
                forward passes, and a `Word` of `session/module_buffers.py`.
        """
        self._do(lambda: self._protocol.say(frame, when, what))

    def issued(self, iteration: int, rolling_hash: int) -> None:
        """Report that this rank has issued all messages of `iteration`, in an order with this hash.

        Rank 0 compares the hashes of all ranks.
        """
        self._do(lambda: self._protocol.issued(iteration, rolling_hash))

    def busy(self, window: int, times_us: Sequence[int]) -> None:
        """Report for how long this rank was busy in the steps of a window, see `stragglers.BusyTimes`.

        Rank 0 compares all ranks, and names those that slow the job.
        """
        self._do(lambda: self._protocol.busy(window, times_us))

    @property
    def slowest(self) -> Slowest | None:
        """The rank that was busy for longest in the last steps; None on all ranks but 0."""
        return self._protocol.slowest

    def waits(self, waited_s: float, what: str) -> None:
        """Report that this rank has waited for `what` for so many seconds.

        Rank 0 says once a minute which ranks wait, and for which.
        """
        self._do(lambda: self._protocol.waits(waited_s, what, time.monotonic()))

    def not_finite(self, iteration: int, name: str) -> None:
        """Report that this rank's gradient of the tensor `name` is not finite.

        Rank 0 tells all ranks, itself too, of the first in an iteration.
        """
        self._do(lambda: self._protocol.not_finite(iteration, name))

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank fails, and why.

        Nothing is sent if it fails because of what rank 0 has told it, or tells all others.
        """
        self._do(lambda: self._protocol.fail(error))

    def close(self, because_of: BaseException | None = None) -> None:
        """Tell the others that this rank leaves, and end the thread.

        Any thread but the channel's own may call it, more than once.

        Args:
            because_of: the exception that made it leave; None if it came to the end of its script.
        """
        if self._closing:
            return
        self._do(partial(self._protocol.close, because_of))
        self._closing = True
        os.write(self._wake_write, b"x")
        self._thread.join(timeout=_END_S)
        self._release()

    # -- facts and actions -------------------------------------------------------------------------

    def _do(self, fact: Callable[[], list[Action[_Connection]]]) -> None:
        """Tell the protocol a fact, and do what follows from it; nothing once this channel closes."""
        with self._lock:
            told = [] if self._closing else [action for action in fact() if not self._sent(action)]
        for action in told:
            if isinstance(action, Tell):
                self._callbacks[action.about](*action.what)
            elif isinstance(action, Warn):
                log.warning("gradlane: %s", action.text)

    def _sent(self, action: Action[_Connection]) -> bool:
        """Do what an action asks of a connection; whether it asked that. Called under the lock."""
        if isinstance(action, Send):
            frame = header(action.frame, action.rank, len(action.payload)) + action.payload
            self._heartbeat.send(action.connection.socket.fileno(), frame)
        elif isinstance(action, Keep):
            self._keep(action.connection)
        elif isinstance(action, Drop):
            self._drop(action.connection)
        else:
            return False
        return True

    def _keep(self, connection: _Connection) -> None:
        self._heartbeat.add(connection.socket.fileno())

    def _drop(self, connection: _Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        self._heartbeat.remove(connection.socket.fileno())
        connection.socket.close()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._attend(lambda: self._closing)
        except Exception as error:  # of a callback: the beats go on, and nobody else would hear of it
            failed = error
            self._do(lambda: self._protocol.callback_failed(failed))

    def _attend(self, is_over: Callable[[], bool], looks_s: Iterator[float] | None = None) -> None:
        """Read, and look for silence, until `is_over`.

        Args:
            is_over: asked when something has come, and every `BEAT_S` at least.
            looks_s: seconds from each question to the next, at most.
        """
        while not is_over():
            now = time.monotonic()
            if now >= self._protocol.look_at:
                self._poll(0.0)  # what has come by now is heard before anybody is called silent
            self._do(partial(self._protocol.time_is, now))
            left_s = max(0.0, self._protocol.look_at - time.monotonic())
            self._poll(left_s if looks_s is None else min(left_s, next(looks_s)))

    def _poll(self, timeout_s: float) -> None:
        """Read what has come, or comes within `timeout_s`, which is at most `BEAT_S`."""
        self._heartbeat.lives()
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, socket.socket):
                self._accept(key.data)
            elif isinstance(key.data, _Connection):
                self._read(key.data)

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, address = listener.accept()
            connection = _Connection(accepted)
        except OSError as error:  # the caller is gone again, or no descriptor is free
            if is_out_of_descriptors(error):
                self._do(self._protocol.drop_strangers)  # make room for ranks, which call again
                if not self._reserve.hang_up(listener):
                    time.sleep(_LOOKS_S[-1])
            return
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._do(lambda: self._protocol.accept(connection, origin_of(str(address[0]))))

    def _read(self, connection: _Connection) -> None:
        try:
            frames = connection.receive()
        except (OSError, ValueError):
            if not self._call_again(connection):
                self._do(lambda: self._protocol.ended(connection))
        else:
            self._do(lambda: self._protocol.came(connection, frames, time.monotonic()))

    def leave_to_parent(self) -> None:
        """In a forked child: take no part, and hold no connection open whose end would then be hidden."""
        self._closing = True
        self._lock = threading.RLock()  # a thread that the child does not have may hold the other
        self._close_sockets()

    def _release(self) -> None:
        self._heartbeat.close()
        self._close_sockets()
        self._selector.close()
        self._reserve.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _close_sockets(self) -> None:
        for connection in self._protocol.connections:
            connection.socket.close()
        for listener in self._listeners.values():
            listener.close()


_open: weakref.WeakSet[ControlChannel] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for channel in list(_open):
        channel.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
