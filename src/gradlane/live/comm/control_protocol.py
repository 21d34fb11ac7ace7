"""ControlProtocol: what one rank says and concludes on the control channel, without clock, thread or I/O.

Facts come in as calls, with the time in seconds where it matters. Each returns the actions that
follow from it, in order. The live channel (`control_channel.py`) carries them out over sockets, and
`tests/faults` over a network whose delays and breaks a seed decides.

    fact                                              action
    a connection came, ended, or frames came on it    Send a frame, Keep or Drop a connection
    the time is `now`                                 Tell the session
    the session decides, fails, leaves, ...           Warn whoever reads the log
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Collection, Hashable, Sequence
from typing import Any, Generic

from gradlane.errors import JobError, NotFiniteError, PeerError, described
from gradlane.live.comm.control_actions import Action, Connection, Drop, Keep, Send, Subject, Tell, Warn
from gradlane.live.comm.control_frames import (
    BEAT,
    HASH,
    PAIR,
    TIMES,
    Cause,
    Frame,
    failure_payload,
    not_finite_payload,
    read_failure,
    read_not_finite,
    read_waits,
    waits_payload,
)  # fmt: skip
from gradlane.live.comm.control_link import Link
from gradlane.live.comm.long_waits import LongWaits
from gradlane.live.comm.stragglers import Slowest, Stragglers
from gradlane.transport.strangers import who_makes_room

BEAT_S = 0.5
SILENT_S = 2.5  # after which one line says that a rank is silent, or that its interpreter does not run: five beats
_SAID_BY_RANK_0: dict[Frame, Subject] = {Frame.CHOICE: "choice", Frame.DECISION: "decision", Frame.BUFFERS: "buffers"}
LAST_WORDS_S = 5.0  # how long rank 0, which fails while it waits, waits for ranks that it has called, to tell them why


class ControlProtocol(Generic[Connection]):
    """The control channel of one rank. Not thread-safe.

    A connection is whatever stands for one to the caller, and hashable.

    Args:
        rank: of this process among the ranks of the channel.
        ranks: their numbers in the whole job, as errors and what the session is told name them.
        timeout_s: seconds for which the job waits for a slow rank; in a text only.
        stall_timeout_s: seconds after which a rank that says nothing has failed.
        now: the time.

    Attributes:
        failure: the first failure that was found here or told; None while there is none.
        look_at: when the caller is to tell the time next, at the latest.
    """

    def __init__(self, rank: int, ranks: Sequence[int], timeout_s: float, stall_timeout_s: float, now: float) -> None:
        self._rank, self._ranks, self._world = rank, ranks, len(ranks)
        self._timeout_s, self._stall_timeout_s = timeout_s, stall_timeout_s
        self.failure: JobError | None = None
        self._first: bytes | None = None  # that failure, as frames tell it
        self.look_at = now
        self._links: dict[Connection, Link] = {}
        self._by_rank: dict[int, Connection] = {}
        self._met: set[int] = set()  # rank 0: ranks that have connected, even if they left again
        self._tokens: dict[int, bytes] = {}  # rank 0: by rank, of those that have been called
        self._hashes: dict[int, dict[int, int]] = {}  # rank 0: iteration -> rank -> hash
        self._stragglers = Stragglers(ranks)  # rank 0
        self._long_waits = LongWaits(ranks, timeout_s)  # rank 0
        self._last_not_finite = -1  # rank 0: iteration
        self._closed = False
        self._whys: dict[JobError, tuple[Cause, int, str]] = {}  # why ranks have left, here and in a frame
        self._actions: list[Action[Connection]] = []

    def _taken(self) -> list[Action[Connection]]:
        actions, self._actions = self._actions, []
        return actions

    # -- meeting -----------------------------------------------------------------------------------

    @property
    def missing(self) -> set[int]:
        """Ranks that rank 0 has not met yet (rank 0 only)."""
        return set(range(1, self._world)) - self._met

    @property
    def on_their_way(self) -> set[int]:
        """Ranks that have a token and have not come with it yet (rank 0 only)."""
        return self._tokens.keys() - self._met

    def token_for(self, rank: int) -> str:
        """A new token, with which `rank` is to begin its connection (rank 0 only)."""
        token = secrets.token_hex(16)
        self._tokens[rank] = token.encode()
        return token

    def accept(self, connection: Connection, origin: Hashable = None) -> list[Action[Connection]]:
        """Somebody has connected (rank 0 only), from `origin`, see `transport.strangers`."""
        strangers = self._strangers()
        goes = who_makes_room([self._links[stranger].origin for stranger in strangers], origin)
        if goes is not None:
            self._drop(strangers[goes])
        self._links[connection] = Link(origin=origin)
        return self._taken()

    def drop_strangers(self) -> list[Action[Connection]]:
        """Make room for ranks: no descriptor is free."""
        for stranger in self._strangers():
            self._drop(stranger)
        return self._taken()

    def connected(self, connection: Connection) -> list[Action[Connection]]:
        """This rank has connected to rank 0, and sent its token (other ranks only)."""
        self._links[connection] = Link()
        self._meet(0, connection)
        return self._taken()

    def give_up_waiting(self, address: str, left: Collection[int] = ()) -> list[Action[Connection]]:
        """The time for ranks to come is over (rank 0 only).

        Args:
            address: of rank 0, for the error message.
            left: ranks that had come before rank 0, and had left again when it came.
        """
        gone = [self._ranks[rank] for rank in sorted(self.missing & set(left))]
        missing = [self._ranks[rank] for rank in sorted(self.missing - set(left))]
        text = (
            f"{self._world - len(gone) - len(missing)} of {self._world} ranks called gradlane.attach within "
            f"{self._timeout_s:.0f} s"
        )
        if missing:
            text += (
                f"; missing: {missing}; if they did, is rank {self._ranks[0]}'s address {address} reachable from them? (it is "
                "that of GRADLANE_INTERFACE, or the one that leads to MASTER_ADDR)"
            )
        if gone:
            text += f"; ranks {gone} had called it before and waited for rank {self._ranks[0]} in vain, which came too late"
        self._find(Cause.MISMATCH, 0, text)
        return self._taken()

    @property
    def connections(self) -> list[Connection]:
        """All that are open."""
        return list(self._links)

    def _strangers(self) -> list[Connection]:
        return [connection for connection, link in self._links.items() if link.rank is None]

    def _meet(self, rank: int, connection: Connection) -> None:
        self._links[connection].rank = rank
        self._by_rank[rank] = connection
        self._actions.append(Keep(connection))

    def _greet(self, connection: Connection, frame: Frame, rank: int, payload: bytes) -> None:
        is_awaited = frame is Frame.HELLO and rank in self._tokens and rank not in self._met
        if not is_awaited or not secrets.compare_digest(payload, self._tokens[rank]):
            raise ValueError("a stranger")
        self._met.add(rank)
        self._meet(rank, connection)
        if self._first is not None:  # it was on its way when the job failed
            self._send(rank, Frame.FAIL, self._first)

    # -- what the session says ---------------------------------------------------------------------

    def say(self, frame: Frame, when: int, what: int) -> list[Action[Connection]]:
        """Rank 0 decides something for all ranks (rank 0 only).

        Args:
            frame: CHOICE, DECISION or BUFFERS.
            when, what: its payload, see `control_frames`.
        """
        self._send_all(frame, PAIR.pack(when, what))
        return self._taken()

    def issued(self, iteration: int, rolling_hash: int) -> list[Action[Connection]]:
        """This rank has issued all messages of `iteration`, in an order with this hash."""
        if self._rank == 0:
            self._compare(iteration, 0, rolling_hash)
        else:
            self._send(0, Frame.ISSUED, HASH.pack(iteration, rolling_hash))
        return self._taken()

    def busy(self, window: int, times_us: Sequence[int]) -> list[Action[Connection]]:
        """This rank was busy for so long in the steps of a window, see `stragglers.BusyTimes`."""
        if self._rank == 0:
            self._look_for_stragglers(0, window, times_us)
        else:
            self._send(0, Frame.BUSY, TIMES.pack(window, *times_us))
        return self._taken()

    def waits(self, waited_s: float, what: str, now: float) -> list[Action[Connection]]:
        """This rank has waited for `what` for so many seconds, and goes on."""
        if self._rank == 0:
            self._long_waits.report(0, waited_s, what, now)
        else:
            self._send(0, Frame.WAITS, waits_payload(waited_s, what))
        return self._taken()

    def not_finite(self, iteration: int, name: str) -> list[Action[Connection]]:
        """This rank's gradient of the tensor `name` is not finite."""
        if self._rank == 0:
            self._tell_not_finite(iteration, 0, name)
        else:
            self._send(0, Frame.NOT_FINITE, not_finite_payload(iteration, self._rank, name))
        return self._taken()

    def fail(self, error: BaseException) -> list[Action[Connection]]:
        """This rank fails with `error`.

        Nothing is sent if it fails because of what rank 0 has told it, or tells all others.
        """
        self._fail_with(error)
        return self._taken()

    def _fail_with(self, error: BaseException) -> None:
        culprit: int | None = self._ranks[self._rank]
        if isinstance(error, PeerError):
            # the others must hear what this rank has found out by itself before they see its end
            if self.failure is not None:
                return
            if error in self._whys:
                self._send_failure(*self._whys[error])
                return
            culprit = error.rank  # None for a server, of which its other clients hear from one another
        elif isinstance(error, NotFiniteError):
            culprit = error.rank
        if culprit in self._ranks and not self._closed:
            self._send_failure(Cause.of(error), self._ranks.index(culprit), _text_of(error))

    def callback_failed(self, error: Exception) -> list[Action[Connection]]:
        """What was told here raised `error`: nobody but this rank can make it the job's failure."""
        text = _text_of(error)
        failure = Cause.RAISED.error(self._ranks[self._rank], text)
        failure.__cause__ = error
        self._fail_with(error)
        self._fail_here(failure, failure_payload(Cause.RAISED, self._rank, text))
        return self._taken()

    def close(self, because_of: BaseException | None = None) -> list[Action[Connection]]:
        """This rank leaves in order, `because_of` an exception or at the end. Nobody is lost from now on."""
        if not self._closed:
            why = b"" if because_of is None else failure_payload(Cause.of(because_of), self._rank, _text_of(because_of))
            self._send_all(Frame.BYE, why)
            self._closed = True
        return self._taken()

    # -- what comes --------------------------------------------------------------------------------

    def came(self, connection: Connection, frames: Sequence[tuple[Frame, int, bytes]], now: float) -> list[Action[Connection]]:
        """Bytes have come on a connection, and with them `frames` became whole: type, rank, payload."""
        link = self._links.get(connection)
        if link is None:
            return []
        link.hear(now)
        try:
            for frame, rank, payload in frames:
                if link.rank is None:
                    self._greet(connection, frame, rank, payload)
                else:
                    self._handle(link, frame, rank, payload)
        except (ValueError, struct.error):
            self._end(connection)
        return self._taken()

    def ended(self, connection: Connection) -> list[Action[Connection]]:
        """A connection has ended, or something else than frames came on it."""
        self._end(connection)
        return self._taken()

    def _end(self, connection: Connection) -> None:
        link = self._drop(connection)
        if link is not None and link.rank is not None and not link.said_bye and not self._closed:
            self._find(Cause.DIED, link.rank, "its process ended, or its host closed the connection")

    def _handle(self, link: Link, frame: Frame, rank: int, payload: bytes) -> None:
        assert link.rank is not None
        if rank >= self._world:
            raise ValueError("a rank that this job does not have")
        if frame is Frame.BEAT:
            self._look_for_slowness(link, BEAT.unpack(payload)[0] / 1000)
        elif frame is Frame.FAIL:
            cause, culprit, text = read_failure(payload)
            if culprit >= self._world:
                raise ValueError("a rank that this job does not have")
            if self._rank == 0:
                self._send_failure(cause, culprit, text, skip=link.rank)
            self._fail_here(cause.error(self._ranks[culprit], text), payload)
        elif frame is Frame.BYE:
            if self._rank == 0:  # the other ranks have no connection to the one that leaves
                rank = link.rank
                self._send_all(Frame.BYE, payload, skip=rank, as_of=rank)
            link.said_bye |= rank == link.rank
            why = None
            if payload:
                cause, _, text = read_failure(payload)
                why = cause.error(self._ranks[rank], text)
                self._whys[why] = cause, rank, text
            self._tell("left", self._ranks[rank], why)
        elif frame in _SAID_BY_RANK_0 and link.rank == 0:
            self._tell(_SAID_BY_RANK_0[frame], *PAIR.unpack(payload))
        elif frame is Frame.ISSUED and self._rank == 0:
            iteration, rolling_hash = HASH.unpack(payload)
            self._compare(iteration, link.rank, rolling_hash)
        elif frame is Frame.BUSY and self._rank == 0:
            window, *times_us = TIMES.unpack(payload)
            self._look_for_stragglers(link.rank, window, times_us)
        elif frame is Frame.WAITS and self._rank == 0:
            self._long_waits.report(link.rank, *read_waits(payload), link.heard)
        elif frame is Frame.NOT_FINITE:
            iteration, culprit, name = read_not_finite(payload)
            if self._rank == 0:
                self._tell_not_finite(iteration, link.rank, name)
            elif culprit < self._world:
                self._tell("not_finite", iteration, self._ranks[culprit], name)

    # -- time --------------------------------------------------------------------------------------

    def time_is(self, now: float) -> list[Action[Connection]]:
        """Look for ranks that say nothing, if it is time to. What has come was told before."""
        if now >= self.look_at:
            late_s = now - self.look_at
            if late_s > BEAT_S:  # this process itself was stopped, or its interpreter was: others may have been, too
                for link in self._links.values():
                    link.spare(now, late_s)
            self.look_at = now + BEAT_S
            self._look_for_silence(now)
            line = self._long_waits.line(now)
            if line is not None:
                self._actions.append(Warn(line))
        return self._taken()

    def _look_for_silence(self, now: float) -> None:
        for rank, connection in list(self._by_rank.items()):
            link = self._links[connection]
            silent_s = now - link.heard
            if link.said_bye:
                continue
            if silent_s > self._stall_timeout_s:
                text = (
                    f"said nothing for {silent_s:.1f} s and its connection is open: stopped or cut off; if it "
                    f"comes back by itself, raise stall_timeout= ({self._stall_timeout_s:g} s)"
                )
                self._find(Cause.STALLED, rank, text)  # which is sent to it, too: it may come back
                self._drop(connection)
            elif silent_s > SILENT_S:
                text = (
                    f"has said nothing for {silent_s:.0f} s and its connection is open (stopped, or cut off?): waiting for it, "
                    f"for up to {self._stall_timeout_s:g} s (stall_timeout=)"
                )
                self._warn_once(link, "silence", text)

    # -- what follows ------------------------------------------------------------------------------

    def _look_for_slowness(self, link: Link, not_run_s: float) -> None:
        if not_run_s > min(SILENT_S, self._stall_timeout_s):
            text = (
                f"is alive, but its interpreter has not run for {not_run_s:.0f} s (a long call that keeps Python's lock?): "
                f"waiting for it, for up to {self._timeout_s:.0f} s (timeout=)"
            )
            self._warn_once(link, "slowness", text)

    def _warn_once(self, link: Link, of: str, text: str) -> None:
        """Warn of the rank behind `link`, unless that was done. One rank does so: rank 0, or rank 1 about rank 0."""
        assert link.rank is not None
        if self._rank <= 1 and of not in link.warned_of:
            link.warned_of.add(of)
            self._actions.append(Warn(f"rank {self._ranks[link.rank]} {text}"))

    @property
    def slowest(self) -> Slowest | None:
        """The rank that was busy for longest in the last steps; None on all ranks but 0."""
        return self._stragglers.slowest

    def _look_for_stragglers(self, rank: int, window: int, times_us: Sequence[int]) -> None:
        self._actions += [Warn(str(straggler)) for straggler in self._stragglers.report(rank, window, times_us)]

    def _tell_not_finite(self, iteration: int, culprit: int, name: str) -> None:
        if iteration > self._last_not_finite:
            self._last_not_finite = iteration
            self._send_all(Frame.NOT_FINITE, not_finite_payload(iteration, culprit, name))
            self._tell("not_finite", iteration, self._ranks[culprit], name)

    def _compare(self, iteration: int, rank: int, rolling_hash: int) -> None:
        of_iteration = self._hashes.setdefault(iteration, {})
        of_iteration[rank] = rolling_hash
        for other, hashed in of_iteration.items():
            if hashed != rolling_hash:
                text = (
                    f"ranks {self._ranks[other]} and {self._ranks[rank]} issued the messages of iteration {iteration} in "
                    f"different orders (hashes {hashed:016x} and {rolling_hash:016x}); sums of that iteration cannot be trusted"
                )
                self._find(Cause.ORDER, rank, text)
                return
        if len(of_iteration) == self._world:
            del self._hashes[iteration]

    def _find(self, cause: Cause, culprit: int, text: str) -> None:
        """A failure was found here: tell the other ranks, then the session."""
        self._send_failure(cause, culprit, text)
        self._fail_here(cause.error(self._ranks[culprit], text), failure_payload(cause, culprit, text))

    def _fail_here(self, error: JobError, payload: bytes) -> None:
        if self.failure is None:
            self.failure, self._first = error, payload
        self._tell("failure", error)

    def _send_failure(self, cause: Cause, culprit: int, text: str, skip: int | None = None) -> None:
        self._send_all(Frame.FAIL, failure_payload(cause, culprit, text), skip)

    def _send_all(self, frame: Frame, payload: bytes = b"", skip: int | None = None, as_of: int | None = None) -> None:
        for rank in self._by_rank:
            if rank != skip:
                self._send(rank, frame, payload, as_of)

    def _send(self, rank: int, frame: Frame, payload: bytes = b"", as_of: int | None = None) -> None:
        connection = self._by_rank.get(rank)
        if connection is not None:  # else it is gone, as the session has been told
            self._actions.append(Send(connection, frame, self._rank if as_of is None else as_of, payload))

    def _tell(self, about: Subject, *what: Any) -> None:
        self._actions.append(Tell(about, what))

    def _drop(self, connection: Connection) -> Link | None:
        link = self._links.pop(connection, None)
        if link is not None:
            if link.rank is not None:
                del self._by_rank[link.rank]
            self._actions.append(Drop(connection))
        return link


def _text_of(error: BaseException) -> str:
    """What the other ranks are told of an exception."""
    return str(error) if isinstance(error, JobError) else described(error)
