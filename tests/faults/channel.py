"""Drives a `ControlProtocol` as `ControlChannel` does, over the simulated network: a thread that reads and looks, and beats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradlane.errors import JobError
from gradlane.live.comm.control_actions import Action, Drop, Keep, Send, Tell
from gradlane.live.comm.control_frames import BEAT, Frame
from gradlane.live.comm.control_protocol import BEAT_S, ControlProtocol
from tests.faults.world import End, Network, Process, connect

Frames = tuple[Frame, int, bytes]
LOOK_S = 0.1  # between two looks of rank 0 for ranks that have not come


class Lags:
    """How late a process does what it does, in seconds.

    Args:
        draw: gives the next value of 0 to 1.
        reads_s: at most, of its reading; its interpreter may be busy or kept.
        beats_s: at most, of its beats, which do not need the interpreter.
        how_often: it is late with its reading, 0 to 1.
    """

    def __init__(self, draw: Callable[[], float], reads_s: float, beats_s: float, how_often: float) -> None:
        self._draw, self.reads_s, self.beats_s, self._how_often = draw, reads_s, beats_s, how_often

    def read(self) -> float:
        return 1e-4 + self._draw() * (self.reads_s if self._draw() < self._how_often else 1e-3)

    def beat(self) -> float:
        return self._draw() * self.beats_s


class SimulatedChannel:
    """The control channel of one rank.

    Args:
        process: that it is in.
        network: of its connection.
        rank, world: of this one.
        timeout_s, stall_timeout_s: as `attach` has them.
        lags: of the process.
        protocol: the class to drive, which may be one with a defect.
        callbacks: by what is told, without `on_`.

    Attributes:
        closed: whether nothing more is done here.
        heard_at: when something first came; None before.
        on_turn: called when the thread has read and looked.
        held: connections that were still open when it had closed them all.
        known: rank 0: ranks that have said to the job's store that they are there, and how to call each.
    """

    def __init__(
        self,
        process: Process,
        network: Network,
        rank: int,
        world: int,
        timeout_s: float,
        stall_timeout_s: float,
        lags: Lags,
        protocol: type[ControlProtocol[Any]],
        **callbacks: Callable[..., None],
    ) -> None:
        self.process, self._network, self._lags = process, network, lags
        self.rank, self._callbacks = rank, callbacks
        self.protocol = protocol(rank, range(world), timeout_s, stall_timeout_s, process.world.now)
        self.closed = self.listens = False
        self.ends: list[End[Any]] = []  # all that this rank ever had
        self._kept: list[End[Any]] = []
        self.known: dict[int, Callable[[str], None]] = {}
        self.held = 0
        self.heard_at: float | None = None
        self.on_turn: Callable[[], None] = lambda: None
        self._called: set[int] = set()
        self._deadline = process.world.now + timeout_s
        self._is_woken = False  # the thread is about to run, since something has come
        self._turn = 0
        self._ran = process.world.now

    # -- meeting -----------------------------------------------------------------------------------

    def listen(self) -> None:
        """Wait for the others (rank 0)."""
        self.listens = True
        self._run()
        self._look_for_ranks()
        self.process.after(self._lags.beat(), self._beat)

    def dial(self, rank_0: SimulatedChannel, token: str) -> None:
        """Connect to rank 0, and send the token (other ranks)."""
        end: End[Any] = connect(self._network, self.process, rank_0.process, self._wake, rank_0._wake)
        self.ends.append(end)
        rank_0.ends.append(end.peer)
        rank_0._do(rank_0.protocol.accept(end.peer))
        end.send((Frame.HELLO, self.rank, token.encode()))
        self._do(self.protocol.connected(end))
        self.process.after(self._lags.beat(), self._beat)
        self._run()

    def _look_for_ranks(self) -> None:
        if not self.protocol.missing or self.protocol.failure is not None:
            return
        for rank in sorted(self.protocol.missing & set(self.known) - self._called):
            self._called.add(rank)
            token, call = self.protocol.token_for(rank), self.known[rank]
            self.process.world.at(self.process.world.now + self._network.delay(), lambda call=call, token=token: call(token))
        if self.process.world.now > self._deadline:
            self._do(self.protocol.give_up_waiting("10.0.0.1"))
        else:
            self.process.after(LOOK_S, self._look_for_ranks)

    # -- what the session says, as `ControlChannel` has it -------------------------------------------

    def say(self, frame: Frame, when: int, what: int) -> None:
        self._do(self.protocol.say(frame, when, what))

    def issued(self, iteration: int, rolling_hash: int) -> None:
        self._do(self.protocol.issued(iteration, rolling_hash))

    def waits(self, waited_s: float, what: str) -> None:
        self._do(self.protocol.waits(waited_s, what, self.process.world.now))

    def not_finite(self, iteration: int, name: str) -> None:
        self._do(self.protocol.not_finite(iteration, name))

    def fail(self, error: BaseException) -> None:
        self._do(self.protocol.fail(error))

    def close(self, because_of: BaseException | None = None) -> None:
        if not self.closed:
            self._do(self.protocol.close(because_of))
            self.release()

    def release(self) -> None:
        """Close every connection, and do nothing more."""
        self.closed = True
        self._kept.clear()
        for end in self.protocol.connections:
            end.close()
        self.held = sum(end.is_open and end.owner is self.process for end in self.ends)

    # -- the thread and the beats ------------------------------------------------------------------

    def _wake(self, _: End[Any]) -> None:
        if not self._is_woken:
            self._is_woken = True
            self.process.after(self._lags.read(), self._run)

    def _run(self) -> None:
        """What the thread does when something has come, or when it is time to look."""
        if self.closed:
            return
        world = self.process.world
        self._ran, self._is_woken = world.now, False
        self._turn_once(world.now)
        self.on_turn()
        self._turn += 1
        turn = self._turn
        self.process.after(
            max(0.0, self.protocol.look_at - world.now) + self._lags.read(), lambda: self._run() if turn == self._turn else None
        )

    def _turn_once(self, now: float) -> None:
        self._read_all()
        self._do(self.protocol.time_is(now))

    def _read_all(self) -> None:
        readable = [end for end in self.ends if end.inbox and end.is_open]
        self.process.world.rng.shuffle(readable)
        for end in readable:
            self._read(end)

    def _read(self, end: End[Any]) -> None:
        frames: list[Frames] = []
        while end.inbox and end.inbox[0] is not None:
            frames.append(end.inbox.popleft())
        if frames:
            self.heard_at = self.process.world.now if self.heard_at is None else self.heard_at
            self._do(self.protocol.came(end, frames, self.process.world.now))
        if end.inbox and end.is_open:
            end.inbox.clear()
            self._do(self.protocol.ended(end))

    def _beat(self) -> None:
        if not self.closed:
            for end in self._kept:
                self._send_beat(end)
            self.process.after(BEAT_S + self._lags.beat(), self._beat)

    def _send_beat(self, end: End[Any]) -> None:
        not_run_s = self.process.world.now - self._ran
        end.send((Frame.BEAT, self.rank, BEAT.pack(round(not_run_s * 1000))))

    # -- actions -----------------------------------------------------------------------------------

    def _do(self, actions: Sequence[Action[End[Any]]]) -> None:
        if self.closed:
            return
        for action in actions:
            if isinstance(action, Send):
                if action.frame in (Frame.FAIL, Frame.BYE):
                    self.process.world.say(self.process, "sends {} to {}", action.frame.name, action.connection.peer.owner)
                action.connection.send((action.frame, action.rank, action.payload))
            elif isinstance(action, Keep):
                self._kept.append(action.connection)
                self._send_beat(action.connection)
            elif isinstance(action, Drop):
                self.process.world.say(self.process, "closes its connection with {}", action.connection.peer.owner)
                self._drop(action.connection)
        for action in actions:
            if isinstance(action, Tell):
                told = action.what[0] if isinstance(action.what[0], JobError) else action.what
                self.process.world.say(self.process, "is told: {} {}", action.about, told)
                self._callbacks[f"on_{action.about}"](*action.what)

    def _drop(self, end: End[Any]) -> None:
        if end in self._kept:
            self._kept.remove(end)
        end.close()
