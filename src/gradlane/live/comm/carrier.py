"""Carrier: what carries out one plan, from gradients that are ready to sums that have arrived.

There are two. `NodeCarrier` tells a node's engine what is ready and asks it what has arrived; the rest happens in native
code. `HostCarrier` owns an engine itself, starts its messages (`Sums`), and records the times. The thread that
brings a fact handles it at once, under the session's lock. It is the training thread, the backend's thread that finished
a sum, the thread that waits for a device (`Staging`), or the control channel's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from gradlane.core.plan import Plan, returns_whole
from gradlane.core.records.dispatch_log import Log
from gradlane.errors import JobError, OrderError
from gradlane.live.backends.base import Sums
from gradlane.live.backends.streams import Event
from gradlane.live.comm.coordination import Coordination
from gradlane.live.comm.failures import Failures
from gradlane.live.comm.recorder import Recorder, now_ns
from gradlane.live.torch_modes import outside_of_modes
from gradlane.schedule import Engine
from gradlane.transport import NodeEngine

Subject = TypeVar("Subject")
_64_BITS = 0xFFFF_FFFF_FFFF_FFFF


class Carrier(Protocol):
    """Carries out one plan, iteration after iteration. Any thread may ask and wait; the training thread calls the rest."""

    def begin(self, iteration: int) -> None:
        """An iteration begins; every message of the one before has arrived. Under the session's lock."""

    def ready(self, tensors: Sequence[int], /) -> object:
        """The gradients of `tensors` are in the memory that is summed. The thread of `Staging` may call it too."""

    def flush(self) -> None:
        """No more gradients follow for now. The thread of `Staging` may call it too."""

    def look(self) -> None:
        """Take note of what has arrived by now, where that is not told by itself."""

    def late(self, tensors: Sequence[int], /) -> list[int]:
        """Those of `tensors` whose sums have not arrived for the host."""

    @property
    def all_arrived(self) -> bool:
        """Whether every message of this iteration has arrived for the host."""

    @property
    def communicated_ns(self) -> int:
        """For how long so far at least one message was on its way; one that still is does not count yet."""

    @property
    def told_if_awaited(self) -> int:
        """Of how many messages a thread of torch.distributed would tell the end if all were waited for."""

    def wait(self, tensor: int | None, what: str, is_past: Callable[[], bool]) -> None:
        """Wait until `tensor` has arrived, or with None everything, or `is_past()`.

        Args:
            tensor: what is waited for.
            what: names it in error messages.
            is_past: whether another thread has begun the next iteration, for which it had to be there.

        Raises:
            JobError: the job has failed, or it did not arrive in time.
        """

    def wait_briefly(self, limit_ns: int) -> bool:
        """Wait until everything has arrived, for `limit_ns` at most; return whether it has.

        Raises:
            JobError: the job has failed.
        """

    def interrupt(self) -> None:
        """End waits that `Failures` cannot, since something has failed or is suspected to have."""

    def describe_state(self) -> str:
        """What is under way and what is waited for, for error messages."""

    @property
    def log(self) -> Log | None:
        """What the Dispatcher was told and answered in the last iterations; None without a log."""


class NodeCarrier:
    """A plan that a node of gradlane's transport carries out by itself.

    Args:
        engine: the node's.
        sums: of the plan, on that node.
        failures: of the session.
        recorder: shows the times that the node keeps.
    """

    told_if_awaited = 0

    def __init__(self, engine: NodeEngine, sums: Sums, failures: Failures, recorder: Recorder) -> None:
        self._engine, self._sums, self._failures = engine, sums, failures
        # bound once: called for every few gradients
        self.ready, self.flush, self.late = engine.ready, engine.flush, engine.late
        self.interrupt, self.describe_state = engine.interrupt, engine.describe_state
        recorder.note_elsewhere(lambda last: engine.spans(last=last))

    def begin(self, iteration: int) -> None:
        self._engine.begin(iteration)
        self._engine.interrupt()
        self._sums.begin([])

    def look(self) -> None:
        """The node has noted it."""

    @property
    def all_arrived(self) -> bool:
        return self._engine.all_arrived

    @property
    def communicated_ns(self) -> int:
        return self._engine.communicated_ns

    def wait(self, tensor: int | None, what: str, is_past: Callable[[], bool]) -> None:
        self._failures.wait_in(self._engine, tensor, what, is_past)

    def wait_briefly(self, limit_ns: int) -> bool:
        return self._failures.wait_briefly_in(self._engine, limit_ns)

    @property
    def log(self) -> Log | None:
        return self._engine.log


class HostCarrier:
    """A plan whose messages this process starts, one by one.

    Args:
        plan: what is carried out.
        sums: of the plan, as a backend has prepared them.
        coordination: with the other ranks, and its failures.
        recorder: keeps the times of what happens.
        coordinated: rank 0 decides the order of messages while they run, and the others follow.
        chooses: this is rank 0 of a coordinated plan.
        keeps_log: keep a log of what the Dispatcher is told and answers.
        is_over: the session is closed or its job has failed: what the sums tell has no effect then.

    Attributes:
        engine: decides when messages start.
        rolling_hashes: of the order of messages by lane: ranks need the same within a lane, but not across lanes.
    """

    def __init__(
        self,
        plan: Plan,
        sums: Sums,
        coordination: Coordination,
        recorder: Recorder,
        *,
        coordinated: bool,
        chooses: bool,
        keeps_log: bool,
        is_over: Callable[[], bool],
    ) -> None:
        self._plan, self._sums = plan, sums
        self._coordination, self._failures = coordination, coordination.failures
        self._lock = self._failures.lock
        self._recorder = recorder
        self._coordinated, self._chooses = coordinated, chooses
        self._is_over = is_over
        self.engine = Engine(plan, self, follow=coordinated and not chooses, keeps_log=keeps_log)
        self.late, self.describe_state = self.engine.late, self.engine.describe_state
        self._ended, self._sent = partial(self._told, self.engine.ended), partial(self._told, self.engine.sent)
        self._iteration = -1
        self._events: dict[int, Event] = {}  # on a device, by tensor: when its gradient is there
        self._began_ns = [0] * len(plan.messages)
        self.rolling_hashes = [0] * len(plan.lanes)
        self._agreed_order = _agreed_order(plan)
        self._unissued = 0
        # messages that have not arrived; since when there is one
        self._under_way = self._since_ns = 0
        self.communicated_ns = 0
        self._has_windows, self._makes_room = plan.has_windows, False
        self._seen: list[tuple[Callable[[int], None], int]] | None = None  # while `_look` looks
        self._has_second_phases, self._returns_whole = bool(plan.second_phases), returns_whole(plan.wire)
        self._tells_receives = sums.tells_sends
        recorder.note_elsewhere(lambda last: [])

    # -- facts, on any thread ----------------------------------------------------------------------

    def begin(self, iteration: int) -> None:
        self._iteration = iteration
        self._unissued = len(self._plan.messages) + len(self._plan.second_phases)
        self.engine.begin()
        self._sums.begin([list(lane) for lane in self._agreed_order])

    def ready(self, tensors: Sequence[int]) -> None:
        reached = self._sums.so_far()
        now = now_ns()
        with outside_of_modes(), self._lock:
            self._failures.check()  # what carried the sums may be gone
            self._recorder.add_each("ready", self._iteration, tensors, now, now)
            if reached is not None:
                self._events.update(dict.fromkeys(tensors, reached))
            self._look()
            self._tell(self.engine.ready, tensors)

    def flush(self) -> None:
        """Each message has been started as soon as its gradients were ready."""

    def allow(self, message: int) -> None:
        """Let `message` start, which rank 0 put next. Under the session's lock."""
        self._sums.expect(message)
        self._tell(self.engine.allow, message)

    def look(self) -> None:
        with outside_of_modes(), self._lock:
            self._look()

    def _look(self) -> None:
        """Handle all that has ended as one fact: what follows from an end is then asked for once."""
        seen: list[tuple[Callable[[int], None], int]] = []
        self._seen = seen
        try:
            self._sums.look()
        finally:
            self._seen = None
        if seen:
            self._handle(_tell_each, seen)

    def _told(self, fact: Callable[[int], None], message: int, error: BaseException | None = None) -> None:
        """Called on any thread: of `message`, or of a phase of it, `fact` is true, or it has failed."""
        if error is not None:  # torch.distributed raises RuntimeError
            (self._failures.suspect if isinstance(error, (JobError, RuntimeError)) else self._coordination.abort)(error)
            return
        with self._lock:
            if self._seen is not None:
                self._seen.append((fact, message))
            else:
                self._handle(fact, message)

    def _handle(self, fact: Callable[[Subject], None], subject: Subject) -> None:
        """Hand over a fact that was told. Its thread has no caller that could handle an error."""
        try:
            if not self._is_over():
                self._tell(fact, subject)
        except BaseException as raised:
            if self._failures.failure is None:
                self._coordination.abort(raised)

    def _tell(self, fact: Callable[[Subject], None], subject: Subject) -> None:
        """Hand a fact to the engine. If it cannot start messages, that is the job's failure."""
        try:
            fact(subject)
        except OrderError as error:
            self._coordination.abort(OrderError(f"{self._failures.whereabouts.where}: {error}"))
            self._failures.check()
        except RuntimeError as error:  # torch.distributed refuses, since a connection is broken
            self._failures.suspect(error)
        else:
            if self._has_windows:
                self._make_room()

    def _make_room(self) -> None:
        """Subscribe to the completions that blocked messages are waiting for.

        Other completions are polled, since a callback costs a turn at the GIL.
        """
        if self._makes_room:  # told of an end from within: the loop below goes on with it
            return
        self._makes_room = True
        try:
            awaited: list[int] = []
            while (blocking := self.engine.blocking()) != awaited:
                awaited = blocking
                self._sums.await_ends(blocking)
        finally:
            self._makes_room = False

    # -- what the engine asks for, under the lock --------------------------------------------------

    def start(self, message: int, second_phase: bool) -> bool:
        """Begin a phase of `message`; return whether it has already ended for the host."""
        # rank 0 does not choose the order of second phases, which is the plan's
        if self._chooses or (self._coordinated and second_phase):
            self._sums.expect(message)
        if self._chooses and not second_phase:
            self._coordination.choose(message)
        now = self._began_ns[message] = now_ns()
        if not second_phase:
            self._since_ns = self._since_ns if self._under_way else now
            self._under_way += 1
        if second_phase:
            has_ended = self._sums.start_second_phase(message, self._ended)
        else:
            events = self._events_of(message) if self._events else []
            has_ended = self._sums.start(message, events, self._ended, self._sent)
        lane = self._plan.messages[message].lane
        self.rolling_hashes[lane] = (self.rolling_hashes[lane] * 1_000_003 + message + 1) & _64_BITS
        self._unissued -= 1
        if self._unissued == 0 and self._sums.needs_one_order:
            self._coordination.issued(sum(self.rolling_hashes) & _64_BITS)
        return has_ended

    def left(self, message: int) -> None:
        """Record that `message` has left its window; from now on it is received, if at all."""
        now = now_ns()
        self._recorder.add("send", self._iteration, message, self._began_ns[message], now)
        if self._returns_whole:  # else a server may have begun to return packets long before
            self._began_ns[message] = now
        if self._failures.awaited and self._sums.norms is not None:
            self._failures.notify_if_awaited()

    def arrived(self, message: int) -> None:
        """Record that the sum of `message` is in the slots of its tensors, for the host."""
        now = now_ns()
        self._under_way -= 1
        if not self._under_way:
            self.communicated_ns += now - self._since_ns
        if self._tells_receives or self._plan.messages[message].two_phase:
            self._recorder.add("receive", self._iteration, message, self._began_ns[message], now)
        # the second phase of a message is its receive; a message of one phase beside such messages
        # gets a receive, too, of no duration
        elif self._has_second_phases:
            self._recorder.add("receive", self._iteration, message, now, now_ns())
        if self._failures.awaited:
            self._failures.notify_if_awaited()

    def _events_of(self, message: int) -> list[Event]:
        return [self._events[tensor] for tensor in self._plan.messages[message].tensors]

    # -- questions and waits -----------------------------------------------------------------------

    @property
    def all_arrived(self) -> bool:
        return not self.engine.missing

    @property
    def told_if_awaited(self) -> int:
        return self.engine.missing

    def wait(self, tensor: int | None, what: str, is_past: Callable[[], bool]) -> None:
        with outside_of_modes():  # what has ended meanwhile starts messages on this thread
            with self._lock:
                messages = range(len(self._plan.messages)) if tensor is None else self.engine.messages_of(tensor)
                self._sums.await_ends(messages)
            if tensor is None:
                self._failures.wait_until(lambda: not self.engine.missing or is_past(), what)
            else:
                self._failures.wait_until(lambda: self.engine.has_arrived(tensor) or is_past(), what)

    def wait_briefly(self, limit_ns: int) -> bool:
        with outside_of_modes():
            with self._lock:
                self._sums.await_ends(range(len(self._plan.messages)))
            return self._failures.wait_briefly(lambda: not self.engine.missing, limit_ns)

    def interrupt(self) -> None:
        """Its waits are those of `Failures`."""

    @property
    def log(self) -> Log | None:
        with self._lock:
            return self.engine.log


def _tell_each(facts: Sequence[tuple[Callable[[int], None], int]]) -> None:
    for fact, message in facts:
        fact(message)


def _agreed_order(plan: Plan) -> list[list[int]]:
    """By lane, the order of messages that the plan fixes, two-phase ones twice; empty without one."""
    order: list[list[int]] = [[] for _ in plan.lanes]
    if plan.sequence is not None:
        for message in (*plan.sequence, *plan.late_second_phases):
            order[plan.messages[message].lane].append(message)
    return order
