"""Verdict: which error a job ends with, of all that one rank hears, without clock, thread or I/O.

The first failure stands. Two things are no failure yet. If a collective failed, the control channel
will soon say which rank is to blame. If a rank has left in order, its part of the sums in flight
may still come.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from gradlane.errors import CommunicationError, JobError, PeerDied, PeerError, PeerFailed, PeerStalled

VERDICT_S = 1.5  # how long a failed collective waits for the control channel to name the culprit
LEFT_S = 5.0  # how long sums may still take after a rank has left in order


class Whereabouts(Protocol):
    """Where this rank is, for error messages."""

    @property
    def where(self) -> str:
        """Rank and iteration."""
        ...

    def describe_state(self) -> str:
        """What is in flight and what is waited for."""
        ...


class Verdict:
    """What one rank holds to be the failure of its job. Not thread-safe.

    Args:
        timeout_s: seconds after which a wait is an error, for its text.
        whereabouts: gives texts for error messages; may be exchanged.

    Attributes:
        failure: the first failure; None while there is none.
        suspicion: a failed collective's error, while there is one.
        tell_others: called with a failure that a wait here has found, before that wait raises it. A script may catch
            the error and end its process without a word, and the others would take that end for the cause.
    """

    def __init__(self, timeout_s: float, whereabouts: Whereabouts) -> None:
        self.whereabouts = whereabouts
        self.failure: JobError | None = None
        self.suspicion: BaseException | None = None
        self.tell_others: Callable[[JobError], None] = lambda error: None
        self._timeout_s = timeout_s
        self._explained_by = self._ended_by = math.inf
        self._left: dict[int, JobError | None] = {}  # by rank that has left in order, the first one first: why

    def fail(self, error: JobError) -> None:
        """Make `error` the failure of this job, unless it has failed before."""
        if self.failure is None:
            self.failure = error

    def suspect(self, error: BaseException, now: float) -> None:
        """A collective has failed; the control channel has `VERDICT_S` to tell which rank is to blame."""
        if self.suspicion is None:
            self.suspicion, self._explained_by = error, now + VERDICT_S

    def left(self, rank: int, why: JobError | None, now: float) -> None:
        """`rank` left in order: sums in flight get `LEFT_S` more seconds to end.

        Args:
            rank: the one that left.
            why: what a job that still needs it fails with; None if it came to the end of its script.
            now: the time.
        """
        if not self._left:
            self._ended_by = now + LEFT_S
        self._left.setdefault(rank, why)

    @property
    def _reason(self) -> JobError | None:
        """Why a rank left; None if none that left has said so."""
        return next((why for why in self._left.values() if why is not None), None)

    def remaining_s(self, deadline: float, what: str, now: float) -> float:
        """Seconds for which a wait may go on; without any left, the job has failed.

        Args:
            deadline: of the wait.
            what: names in error messages what is waited for.
            now: the time.

        Raises:
            JobError: the failure, now or before.
        """
        self.check()
        remaining_s = min(deadline, self._explained_by, self._ended_by) - now
        if remaining_s <= 0 or self._is_explained:
            error = self.why_not(what, now)
            self.fail(error)
            self.tell_others(error)
            raise error
        return remaining_s

    @property
    def _is_explained(self) -> bool:
        """Whether nothing more is to be heard: a node has waited for a silent rank already, and who could tell more may have
        left; or a sum has failed, and a rank that left has said why.
        """
        if self.suspicion is None:
            return False
        return self._reason is not None or (isinstance(self.suspicion, PeerStalled) and bool(self._left))

    def check(self) -> None:
        """Raise the failure of this job, if there is one."""
        if self.failure is not None:
            raise self.failure

    def why_not(self, what: str, now: float) -> JobError:
        """Why `what` has not ended."""
        where, suspicion = self.whereabouts.where, self.suspicion
        lost = suspicion.rank if isinstance(suspicion, PeerError) else None  # by a node; an external server has no rank
        if isinstance(suspicion, (PeerFailed, PeerStalled)) or (isinstance(suspicion, PeerError) and lost not in self._left):
            # ranks that have left since then left because of that, or had all that they needed
            return suspicion
        # a rank that left in order closed its connections, and what carries the sums reports a failure
        if self._left and (suspicion is not None or now >= self._ended_by):
            if self._reason is not None:
                return self._reason
            left = next(iter(self._left)) if lost is None else lost
            return PeerDied(
                f"rank {left} left the job while {where} waited for {what}; do all ranks run the same number of steps?", left
            )
        if isinstance(suspicion, JobError):
            return suspicion
        if suspicion is not None:
            reason = str(suspicion).strip().partition("\n")[0]
            failed = CommunicationError(f"{where}: {what} failed in torch.distributed: {reason}")
            failed.__cause__ = suspicion
            return failed
        return CommunicationError(
            f"{where}: no end of {what} within {self._timeout_s:.0f} s; {self.whereabouts.describe_state()}; every rank still "
            "answers, so a rank is slow or has not reached this iteration; raise timeout= if that is to be expected"
        )
