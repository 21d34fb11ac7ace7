"""Coordination: what rank 0 decides for all ranks of a session, over the control channel.

That is the order of messages, where a session is coordinated (ByteScheduler, section 5); what is to be done before an
iteration begins (`adapt.controller`); and that the model's buffers come out of turn (`session.module_buffers`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from gradlane.errors import JobError
from gradlane.live.comm.control_channel import ControlChannel
from gradlane.live.comm.failures import Failures


class Coordination:
    """Owned by a session's driver.

    Args:
        rank: of this process; rank 0 decides.
        failures: of the session; its lock guards what arrives here.
        make_channel: makes the control channel, given its callbacks (every rank calls it).
        on_choice: hears of the coordinator's next message of the present iteration; under the lock.
        on_buffers: hears that rank 0 sends its buffers out of turn.
    """

    def __init__(
        self,
        rank: int,
        failures: Failures,
        make_channel: Callable[..., ControlChannel],
        on_choice: Callable[[int], None],
        on_buffers: Callable[[int, int], None],
    ) -> None:
        self._rank = rank
        self._failures = failures
        self._on_choice = on_choice
        self._iteration = -1
        self._choices: dict[int, list[int]] = {}  # of iterations that this rank has not begun
        self._decisions: dict[int, int] = {}  # likewise
        self.channel = make_channel(
            on_failure=failures.fail,
            on_choice=self._choice_told,
            on_left=failures.left,
            on_decision=self._decision_told,
            on_buffers=on_buffers,
        )

    def begin(self, iteration: int) -> None:
        """Iteration `iteration` begins here; choices that came before are followed now. Under the lock."""
        self._iteration = iteration
        for message in self._choices.pop(iteration, ()):
            self._on_choice(message)

    def choose(self, message: int) -> None:
        """Rank 0: `message` is next, for everybody."""
        self.channel.choose(self._iteration, message)

    def issued(self, rolling_hash: int) -> None:
        """All messages of this iteration have been started, in an order with this hash; ranks compare theirs."""
        self.channel.issued(self._iteration, rolling_hash)

    def decide(self, iteration: int, decided: int | None) -> int:
        """What rank 0 has decided for `iteration`: `decided` there, waited for elsewhere (None)."""
        if decided is not None:
            self.channel.decide(iteration, decided)
            return decided
        self._failures.wait_until(lambda: iteration in self._decisions, "rank 0's decision on the next iteration")
        return self._decisions.pop(iteration)

    def announce_buffers(self, forward: int, why: int) -> None:
        """Rank 0: the model's buffers will come out of turn, see `session.module_buffers`."""
        self.channel.buffers(forward, why)

    def _choice_told(self, iteration: int, message: int) -> None:
        with self._failures.lock, contextlib.suppress(JobError):  # noted in `failures`; no caller is there to raise it to
            if iteration == self._iteration:
                self._on_choice(message)
            else:  # the coordinator may be ahead of this rank
                self._choices.setdefault(iteration, []).append(message)

    def _decision_told(self, iteration: int, decided: int) -> None:
        with self._failures.lock:
            self._decisions[iteration] = decided
        self._failures.notify()
