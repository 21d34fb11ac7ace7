"""Coordination: what rank 0 decides for all ranks of a session, over the control channel.

Rank 0 decides the order of messages, if the session is coordinated (ByteScheduler, section 5), and
what is done before an iteration begins (`adapt/controller.py`). It also announces broadcasts of the
model's buffers in addition to the regular ones (`session/module_buffers.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from gradlane.errors import JobError, PeerFailed, described, told_of
from gradlane.live.comm.control_frames import Frame

if TYPE_CHECKING:  # so that what is decided here can be simulated without torch
    from gradlane.live.comm.control_channel import ControlChannel
    from gradlane.live.comm.failures import Failures

_KEPT = 8  # iterations; a rank is a step or two behind rank 0 at most


class Coordination:
    """Made by `attach`, where this rank meets the others; what rank 0 says before a session listens
    is kept for it.

    Args:
        global_rank: of this process in the whole job.
        failures: of the session; its lock guards what arrives here.
        make_channel: makes the control channel, given its callbacks (every rank calls it).

    Raises what `make_channel` raises.
    """

    def __init__(self, global_rank: int, failures: Failures, make_channel: Callable[..., ControlChannel]) -> None:
        self._global_rank = global_rank
        self.failures = failures
        self._iteration = -1
        self._choices: dict[int, list[int]] = {}  # of iterations that this rank has not begun
        self._decisions: dict[int, int] = {}  # likewise
        self._not_finite: dict[int, tuple[int, str]] = {}  # by iteration: whose gradient of what
        self._buffers: list[tuple[int, int]] = []  # announced while nobody listened
        self._on_choice: Callable[[int], None] | None = None
        self._on_buffers: Callable[[int, int], None] | None = None
        self.channel = make_channel(
            on_failure=failures.fail,
            on_choice=self._choice_told,
            on_left=failures.left,
            on_decision=self._decision_told,
            on_buffers=self._buffers_told,
            on_not_finite=self._not_finite_told,
        )
        failures.tell_others_by(self.channel.fail)
        failures.report_waits_by(self.channel.waits)

    def listen(self, on_choice: Callable[[int], None], on_buffers: Callable[[int, int], None]) -> None:
        """Begin to hand on what rank 0 says. Called once, before the first `begin`.

        Args:
            on_choice: called under the lock with the message that rank 0 puts next in the iteration
                that runs here.
            on_buffers: called under the lock with a number of forward passes and what rank 0 says of
                its buffers after them, see `ControlChannel`.
        """
        with self.failures.lock:
            self._on_choice, self._on_buffers = on_choice, on_buffers
            for forward, word in self._buffers:
                on_buffers(forward, word)

    def abort(self, error: BaseException) -> None:
        """Fail this rank with `error`, and tell the other ranks.

        In this order, so that two ranks that find the same fault each keep their own error rather
        than blame one another.
        """
        own = error
        if not isinstance(own, JobError):
            own = PeerFailed(told_of(self._global_rank, "failed", described(error)), self._global_rank)
            own.__cause__ = error
        self.failures.fail(own)
        self.channel.fail(error)

    def begin(self, iteration: int) -> None:
        """Begin `iteration` on this rank, and follow the choices that came before it began.

        Called under the lock.
        """
        self._iteration = iteration
        for message in self._choices.pop(iteration, ()):
            self._choose(message)

    def choose(self, message: int) -> None:
        """Tell the other ranks that `message` is next (rank 0 only)."""
        self.channel.say(Frame.CHOICE, self._iteration, message)

    def issued(self, rolling_hash: int) -> None:
        """Report that all messages of this iteration were started, in an order with this hash.

        Rank 0 compares the hashes of all ranks.
        """
        self.channel.issued(self._iteration, rolling_hash)

    def decide(self, iteration: int, decided: int | None) -> int:
        """Agree on what rank 0 decided for `iteration`.

        Args:
            iteration: the one that is about to begin.
            decided: rank 0 passes its decision and broadcasts it; other ranks pass None and block
                until it arrives.

        Returns:
            The decision.

        Raises:
            JobError: the job has failed, or the decision did not arrive in time.
        """
        if decided is not None:
            self.channel.say(Frame.DECISION, iteration, decided)
            return decided
        self.failures.wait_until(lambda: iteration in self._decisions, "rank 0's decision on the next iteration")
        return self._decisions.pop(iteration)

    def not_finite(self, name: str) -> None:
        """Report that this rank's gradient of the tensor `name` is not finite in this iteration."""
        self.channel.not_finite(self._iteration, name)

    def first_not_finite(self, iteration: int) -> tuple[int, str]:
        """The rank whose gradient was not finite in `iteration`, and its tensor: those that rank 0 heard of first.

        Blocks until rank 0 has told that.

        Raises:
            JobError: the job has failed, or rank 0 has not told it in time.
        """
        self.failures.wait_until(lambda: iteration in self._not_finite, "the rank whose gradient is not finite")
        return self._not_finite[iteration]

    def announce_buffers(self, forward: int, word: int) -> None:
        """Tell the other ranks whether buffers come in addition to the regular broadcasts.

        Args:
            forward: number of forward passes that have ended.
            word: a `Word` of `session/module_buffers.py`.
        """
        self.channel.say(Frame.BUFFERS, forward, word)

    def _choice_told(self, iteration: int, message: int) -> None:
        # an error is noted in `failures`; this thread has no caller that could handle it
        with self.failures.lock, contextlib.suppress(JobError):
            if iteration == self._iteration:
                self._choose(message)
            else:  # rank 0 may be ahead of this rank
                self._choices.setdefault(iteration, []).append(message)

    def _choose(self, message: int) -> None:
        assert self._on_choice is not None, "an iteration has begun"
        self._on_choice(message)

    def _buffers_told(self, forward: int, word: int) -> None:
        with self.failures.lock:
            if self._on_buffers is None:
                self._buffers.append((forward, word))
            else:
                self._on_buffers(forward, word)

    def _not_finite_told(self, iteration: int, rank: int, name: str) -> None:
        with self.failures.lock:
            self._not_finite[iteration] = rank, name
            if len(self._not_finite) > _KEPT:
                del self._not_finite[min(self._not_finite)]
        self.failures.notify()

    def _decision_told(self, iteration: int, decided: int) -> None:
        with self.failures.lock:
            self._decisions[iteration] = decided
        self.failures.notify()
