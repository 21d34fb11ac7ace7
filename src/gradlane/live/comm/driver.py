"""Exchange: the messages of a session on their way, and everything that waits for them.

It drives the Dispatcher: a fact is handled at once by the thread that brings it (the training thread, the
thread of the backend that finished a sum, the control channel's thread), under one lock. There is no
scheduling thread that a message would have to wait for.

The training thread blocks only in `wait_until`, which ends in a result or in a typed error within the
timeout. The first failure stands; everything that waits, and every later call, raises it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradlane.core.plan import Plan
from gradlane.core.profile import TensorSpec
from gradlane.errors import CommunicationError, JobError, OrderError, PeerDied, PeerError, PeerFailed
from gradlane.live.backends.base import Backend
from gradlane.live.backends.gradient_buffers import GradientBuffers
from gradlane.live.backends.process_groups import ProcessGroups
from gradlane.live.backends.streams import Event
from gradlane.live.comm.control_channel import ControlChannel
from gradlane.live.comm.recorder import Recorder, now_ns
from gradlane.schedule import Dispatcher

_VERDICT_S = 1.5  # how long a failed collective waits for the control channel to name the culprit
_64_BITS = 0xFFFF_FFFF_FFFF_FFFF
_LEFT_S = 5.0  # how long sums may take after a peer has left in order


class Driver:
    """Owned by one session. `slots[t]` holds tensor t's gradient and, once it has arrived, its sum."""

    def __init__(
        self,
        rank: int,
        timeout_s: float,
        backend: Backend,
        recorder: Recorder,
        peers: Callable[..., ControlChannel],
        on_buffers: Callable[[int, int], None],
    ) -> None:
        self.rank = rank
        self.iteration = -1
        self.failure: JobError | None = None
        self._timeout_s = timeout_s
        self._backend = backend
        self._recorder = recorder
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._suspicion: tuple[BaseException, float] | None = None
        self._left: tuple[int, float] | None = None
        self._closed = False
        self._awaited: Callable[[], bool] | None = None  # what the training thread is blocked for
        self._choices: dict[int, list[int]] = {}  # told by the coordinator before this rank was there
        self._to_issue: deque[int] = deque()
        self._issuing = False
        self._unissued = 0
        self._rolling_hashes: list[int] = []  # by lane: across lanes, ranks need no one order
        self._gradient_buffers = GradientBuffers([])
        self._laid_out: tuple[TensorSpec, ...] = ()
        self._turns: dict[int, int] = {}  # what rank 0 decided for iterations that this rank has not begun
        self._control = peers(
            on_failure=self.fail,
            on_choice=self._on_choice,
            on_left=self._on_left,
            on_turn=self._on_turn,
            on_buffers=on_buffers,
        )

    # -- one plan, one iteration -----------------------------------------------------------------------

    def take_up(self, plan: Plan, params: Sequence[torch.nn.Parameter], coordinated: bool) -> None:
        """Make `plan` the plan in force, for `params` in its tensor order. Nothing may be under way.

        coordinated: rank 0 decides the order as it goes, the others follow it.
        """
        if plan.tensors != self._laid_out:  # else what points into the slots may stay, and their memory is warm
            self._gradient_buffers, self._laid_out = GradientBuffers(params), plan.tensors
        self.plan = plan
        self.slots = self._gradient_buffers.slots
        self._buffers = self._gradient_buffers.message_buffers(plan)
        self._parts_at_first = [0] * len(params)
        self._messages_of: list[list[int]] = [[] for _ in params]
        for index, message in enumerate(plan.messages):
            for tensor in message.tensors:
                self._parts_at_first[tensor] += 1
                self._messages_of[tensor].append(index)
        self._parts = [0] * len(params)  # messages of each tensor that have not arrived
        self._events: list[Event | None] = [None] * len(params)
        self._began_ns = [0] * len(plan.messages)
        self._coordinated, self._chooses = coordinated, coordinated and self.rank == 0
        self._rolling_hashes = [0] * len(plan.lanes)
        self._dispatcher = Dispatcher(plan, follow=coordinated and self.rank != 0)
        self._backend.prepare(plan, self._buffers)

    def begin(self) -> None:
        """A new iteration; all of the one before must have arrived."""
        self._gradient_buffers.mark_all_present()
        with self._lock:
            self.iteration += 1
            self._parts = list(self._parts_at_first)
            self._unissued = len(self.plan.messages) + len(self.plan.second_phases)
            self._dispatcher.begin()
            self._backend.begin(self._agreed_order())
            for message in self._choices.pop(self.iteration, ()):
                self._follow(message)

    def _agreed_order(self) -> list[list[int]]:
        order: list[list[int]] = [[] for _ in self.plan.lanes]
        if self.plan.sequence is not None:
            for message in (*self.plan.sequence, *self.plan.second_phases):
                order[self.plan.messages[message].lane].append(message)
        return order

    def ready(self, tensor: int) -> int:
        """Slot `tensor` holds this rank's gradient. Returns the time of it."""
        self._events[tensor] = self._backend.so_far()
        now = now_ns()
        with self._lock:
            self._recorder.add("ready", self.iteration, tensor, now, now)
            self._issue(self._dispatcher.ready(tensor))
        return now

    def put_absent(self, tensor: int, gradient: torch.Tensor | None, scale: float, counts: bool) -> None:
        """This backward pass had no gradient for `tensor`: into its slot comes `gradient` times `scale`, or zeros.

        counts: whether this rank used the tensor all the same, see `used_by_anybody`.
        """
        if gradient is None:
            self.slots[tensor].zero_()
        else:
            torch.mul(gradient.detach(), scale, out=self.slots[tensor])
        if not counts:
            self._gradient_buffers.presence[tensor].zero_()

    def used_by_anybody(self, tensor: int) -> bool:
        """Whether some rank contributed to the sum of `tensor`, which must have arrived."""
        return float(self._gradient_buffers.presence[tensor]) != 0

    # -- messages: under the lock, on any thread -------------------------------------------------------------

    def _issue(self, starts: list[int]) -> None:
        self._to_issue.extend(starts)
        if self._issuing:  # a sum that ended while it was being started: the loop below goes on with it
            return
        self._issuing = True
        try:
            while self._to_issue:
                self._start(self._to_issue.popleft())
        except OrderError as error:
            self.abort(OrderError(f"rank {self.rank}, iteration {self.iteration}: {error}"))
            self.check()
        except RuntimeError as error:  # torch.distributed refuses: a connection is broken already
            self.suspect(error)
        finally:
            self._issuing = False

    def _start(self, message: int) -> None:
        again = self._dispatcher.in_second_phase(message)  # the order of second halves is the plan's: nobody chooses it
        if self._chooses or (self._coordinated and again):
            self._backend.expect(message)
        if self._chooses and not again:
            self._control.choose(self.iteration, message)
        self._began_ns[message] = now_ns()
        buffer = self._buffers[message]
        if again:
            ended = self._backend.start_second_phase(message, buffer, self._message_done)
        else:
            ended = self._backend.start(message, buffer, self._events_of(message), self._message_done, self._message_sent)
        lane = self.plan.messages[message].lane
        self._rolling_hashes[lane] = (self._rolling_hashes[lane] * 1_000_003 + message + 1) & _64_BITS
        self._unissued -= 1
        if self._unissued == 0 and self._backend.needs_one_order:
            self._control.issued(self.iteration, sum(self._rolling_hashes) & _64_BITS)
        if ended:
            self._arrived(message)

    def _events_of(self, message: int) -> list[Event]:
        return [event for tensor in self.plan.messages[message].tensors if (event := self._events[tensor]) is not None]

    def _message_done(self, message: int, error: BaseException | None) -> None:
        """Called by the backend, once a message (or half)."""
        if error is not None:
            self.suspect(error)
            return
        # a JobError is noted in self.failure; there is no caller to raise it to
        with self._lock, contextlib.suppress(JobError):
            if not self._closed and self.failure is None:
                self._arrived(message)

    def _message_sent(self, message: int) -> None:
        """Called by the backend, once a message, where it tells sends."""
        with self._lock, contextlib.suppress(JobError):
            if not self._closed and self.failure is None:
                self._left_window(message)

    def _left_window(self, message: int) -> None:
        now = now_ns()
        self._recorder.add("send", self.iteration, message, self._began_ns[message], now)
        if self.plan.wire == "fifo":  # else a server may have begun to return it long ago
            self._began_ns[message] = now
        self._issue(self._dispatcher.finished(message))

    def _arrived(self, message: int) -> None:
        two_phase = self.plan.messages[message].two_phase
        if two_phase and not self._dispatcher.in_second_phase(message):
            self._left_window(message)
            return
        for tensor in self.plan.messages[message].tensors:
            self._parts[tensor] -= 1
        now = now_ns()
        if two_phase or self._backend.tells_sends:
            self._recorder.add("receive", self.iteration, message, self._began_ns[message], now)
        else:
            self._left_window(message)
            if self.plan.second_phases:  # beside halves that are received, wholes are
                self._recorder.add("receive", self.iteration, message, now, now_ns())
        if two_phase:
            self._issue(self._dispatcher.finished(message))
        # a wake-up costs more than a message's bookkeeping: only when it is what is waited for
        if self._awaited is not None and self._awaited():
            self._condition.notify_all()

    def _on_choice(self, iteration: int, message: int) -> None:
        """The coordinator's next message; the coordinator may be ahead of this rank."""
        with self._lock, contextlib.suppress(JobError):
            if iteration == self.iteration:
                self._follow(message)
            else:
                self._choices.setdefault(iteration, []).append(message)

    def turn(self, decided: int | None) -> int:
        """What rank 0 has decided for the next iteration: `decided` there, waited for elsewhere (None)."""
        iteration = self.iteration + 1
        if decided is not None:
            self._control.turn(iteration, decided)
            return decided
        self.wait_until(lambda: iteration in self._turns, "the word of rank 0 on the next iteration")
        return self._turns.pop(iteration)

    def announce_buffers(self, forward: int, why: int) -> None:
        """Rank 0: the model's buffers will come out of turn, see `buffers.py`."""
        self._control.buffers(forward, why)

    def _on_turn(self, iteration: int, what: int) -> None:
        with self._condition:
            self._turns[iteration] = what
            self._condition.notify_all()

    def _follow(self, message: int) -> None:
        self._backend.expect(message)
        self._issue(self._dispatcher.allow(message))

    # -- waiting ---------------------------------------------------------------------------------------

    def has_arrived(self, tensor: int) -> bool:
        """Whether the sum of `tensor` is there, without waiting."""
        if self._parts[tensor]:
            return False
        return not self._backend.has_streams or all(self._backend.has_ended(message) for message in self._messages_of[tensor])

    def wait_for(self, tensor: int) -> None:
        """Return when the sum of `tensor` is in its slot (on a device: for whatever the stream does next)."""
        if self._parts[tensor]:
            began = now_ns()
            self.wait_until(lambda: not self._parts[tensor], f"the sum of {self.plan.tensors[tensor].name}")
            self._recorder.add("wait", self.iteration, tensor, began, now_ns())
        if self._backend.has_streams and self.iteration >= 0:
            for message in self._messages_of[tensor]:
                self._backend.join(message)

    def wait_for_all(self) -> None:
        """Return when every sum of this iteration is in its slot."""
        if any(self._parts):
            began = now_ns()
            self.wait_until(lambda: not any(self._parts), "the sums of this iteration")
            self._recorder.add("wait", self.iteration, -1, began, now_ns())
        if self._backend.has_streams and self.iteration >= 0:
            for message in range(len(self.plan.messages)):
                self._backend.join(message)

    def wait_until(self, predicate: Callable[[], bool], what: str) -> None:
        """Block until `predicate()`, or raise the typed reason why that will not come."""
        deadline = time.monotonic() + self._timeout_s
        with self._condition:
            self._awaited = predicate
            while not predicate():
                self.check()
                limits = [limit for _, limit in (self._suspicion or (0, deadline), self._left or (0, deadline))]
                remaining = min(deadline, *limits) - time.monotonic()
                if remaining > 0:
                    self._condition.wait(remaining)
                else:
                    self.fail(self._why_not(what))
            self._awaited = None

    def wait_for_works(self, groups: ProcessGroups, works: Sequence[Any], what: str) -> None:
        """Return when collectives that were begun in `groups` have ended, or raise as any wait does."""
        if self._backend.has_streams:
            for work in works:
                work.wait()  # the stream waits
            return
        ended = False

        def end(error: BaseException | None) -> None:
            nonlocal ended
            ended = error is None
            self.notify(error)

        groups.when_ended(works, end)
        self.wait_until(lambda: ended, what)

    def collective(self, call: Callable[[], Any]) -> None:
        """A blocking collective between iterations, whose failure is told like any other."""
        try:
            call()
        except RuntimeError as error:
            self.suspect(error)
            self.wait_until(lambda: False, "an agreement between iterations")

    def notify(self, error: BaseException | None) -> None:
        """Something that `wait_until` may be waiting for has ended, well or not."""
        if error is not None:
            self.suspect(error)
        with self._condition:
            self._condition.notify_all()

    # -- failing ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the failure of this job, if there is one."""
        if self.failure is not None:
            raise self.failure

    def fail(self, error: JobError) -> None:
        with self._condition:
            if self.failure is None:
                self.failure = error
            self._condition.notify_all()

    def abort(self, error: BaseException) -> None:
        """This rank fails: wait for nothing any more, and tell the others.

        In this order, so that a rank which found its own fault does not blame another that found the same.
        """
        own = error if isinstance(error, JobError) else None
        self.fail(own or PeerFailed(f"rank {self.rank} failed: {type(error).__name__}: {error}", self.rank))
        if not self._closed:
            self._control.fail(error)

    def suspect(self, error: BaseException) -> None:
        """A collective failed; the control channel will shortly know which rank is to blame."""
        with self._condition:
            if self._suspicion is None:
                self._suspicion = (error, time.monotonic() + _VERDICT_S)
            self._condition.notify_all()

    def _on_left(self, rank: int) -> None:
        with self._condition:
            if self._left is None:
                self._left = (rank, time.monotonic() + _LEFT_S)
            self._condition.notify_all()

    def _why_not(self, what: str) -> JobError:
        where = f"rank {self.rank}, iteration {self.iteration}"
        if self._suspicion is not None and isinstance(self._suspicion[0], PeerError) and self._suspicion[0].rank is None:
            return self._suspicion[0]  # a server apart is gone: whoever has left since left because of it
        # whoever left in order closed its connections, which torch.distributed reports as a failure
        if self._left is not None and (self._suspicion is not None or time.monotonic() >= self._left[1]):
            rank = self._left[0]
            return PeerDied(
                f"rank {rank} left the job while {where} waited for {what}; do all ranks run the same number of steps?", rank
            )
        if self._suspicion is not None:
            error = self._suspicion[0]
            if isinstance(error, JobError):
                return error
            reason = str(error).strip().partition("\n")[0]
            return CommunicationError(f"{where}: {what} failed in torch.distributed: {reason}")
        return CommunicationError(
            f"{where}: no end of {what} within {self._timeout_s:.0f} s; {self._dispatcher.describe_state()}; every rank "
            "still answers, so a rank is slow or has not reached this iteration; raise timeout= if that is to be expected"
        )

    def close(self) -> None:
        """End the control channel, then the backend."""
        self._closed = True
        self._control.close()
        failure = self.failure
        if failure is None and self._suspicion is not None:
            failure = self._why_not("the last sums")
        self._backend.close(failure)
