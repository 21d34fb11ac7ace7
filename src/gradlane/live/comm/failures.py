"""Failures: the first failure of a job, which stands, and waiting that ends in a result or in that failure.

The training thread blocks only in `wait_until`, which ends within the timeout. Everything that waits, and every later call,
raises the first failure. Any thread may report one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gradlane.errors import CommunicationError, JobError, PeerDied, PeerError
from gradlane.live.backends.process_groups import ProcessGroups

_VERDICT_S = 1.5  # how long a failed collective waits for the control channel to name the culprit
_LEFT_S = 5.0  # how long sums may take after a peer has left in order


class Whereabouts(Protocol):
    """Where this rank is, for messages."""

    @property
    def where(self) -> str:
        """Rank and iteration."""
        ...

    def describe_state(self) -> str:
        """What is under way and what is waited for."""
        ...


class Failures:
    """Owned by a session's driver. `lock` guards whatever the threads that bring facts share; `wait_until` waits on it.

    Args:
        whereabouts: for messages.
        timeout_s: seconds after which a wait is an error.
    """

    def __init__(self, whereabouts: Whereabouts, timeout_s: float) -> None:
        self.failure: JobError | None = None
        self.lock = threading.RLock()
        self._condition = threading.Condition(self.lock)
        self._whereabouts, self._timeout_s = whereabouts, timeout_s
        self._suspicion: tuple[BaseException, float] | None = None  # a failed collective, and how long it may stay unexplained
        self._left: tuple[int, float] | None = None  # a rank that has left in order, and how long sums may still take
        self._awaited: Callable[[], bool] | None = None  # what the training thread is blocked for

    # -- reporting ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the failure of this job, if there is one."""
        if self.failure is not None:
            raise self.failure

    def fail(self, error: JobError) -> None:
        """`error` is the failure of this job, unless it has failed before."""
        with self._condition:
            if self.failure is None:
                self.failure = error
            self._condition.notify_all()

    def suspect(self, error: BaseException) -> None:
        """A collective failed; the control channel will shortly know which rank is to blame."""
        with self._condition:
            if self._suspicion is None:
                self._suspicion = (error, time.monotonic() + _VERDICT_S)
            self._condition.notify_all()

    def left(self, rank: int) -> None:
        """`rank` left the job in order: what is under way may still end, but not for long."""
        with self._condition:
            if self._left is None:
                self._left = (rank, time.monotonic() + _LEFT_S)
            self._condition.notify_all()

    def notify(self, error: BaseException | None = None) -> None:
        """Something that `wait_until` may be waiting for has ended, well or not."""
        if error is not None:
            self.suspect(error)
        with self._condition:
            self._condition.notify_all()

    def notify_if_awaited(self) -> None:
        """As `notify`, but only if it is what is waited for: a wake-up costs more than a message's bookkeeping."""
        if self._awaited is not None and self._awaited():
            self._condition.notify_all()

    # -- waiting -----------------------------------------------------------------------------------------

    def wait_until(self, predicate: Callable[[], bool], what: str) -> None:
        """Block until `predicate()`, or raise the typed reason why that will not come. what: is waited for, for messages."""
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
        """Return when collectives on the host that were begun in `groups` have ended, or raise as any wait does."""
        ended = False

        def end(error: BaseException | None) -> None:
            nonlocal ended
            ended = error is None
            self.notify(error)

        groups.when_ended(works, end)
        self.wait_until(lambda: ended, what)

    def collective(self, call: Callable[[], Any]) -> None:
        """Run a blocking collective between iterations, whose failure is told like any other."""
        try:
            call()
        except RuntimeError as error:
            self.suspect(error)
            self.wait_until(lambda: False, "an agreement between iterations")

    # -- verdicts ----------------------------------------------------------------------------------------

    def verdict(self) -> JobError | None:
        """Why the last sums, which nobody waited for, did not end; None where nothing is known to be wrong."""
        return self.failure or (None if self._suspicion is None else self._why_not("the last sums"))

    def _why_not(self, what: str) -> JobError:
        where = self._whereabouts.where
        if self._suspicion is not None and isinstance(self._suspicion[0], PeerError) and self._suspicion[0].rank is None:
            return self._suspicion[0]  # an external server is gone: whoever has left since left because of it
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
            f"{where}: no end of {what} within {self._timeout_s:.0f} s; {self._whereabouts.describe_state()}; every rank still "
            "answers, so a rank is slow or has not reached this iteration; raise timeout= if that is to be expected"
        )
