"""Broadcasts: keeps the model's buffers equal to rank 0's while ranks run in step.

Buffers are sent at the start of a forward pass, as DDP does. To send them sooner, rank 0 would need
a control channel to say that its script has changed one since.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gradlane.errors import CommunicationError
from gradlane.live.backends.process_groups import NewGroups
from gradlane.live.comm.turn import given_up
from gradlane.live.remote_update.values import Values
from gradlane.live.session.buffer_places import BufferPlaces
from gradlane.live.session.job import Job
from gradlane.live.session.module_buffers import BufferSync

_POLL_S = 0.5
_VERDICT_S = 1.5  # for which a failed broadcast waits for the transport to name the failed rank


class Broadcasts:
    """Broadcasts the buffers of one session's model.

    Used on the training thread; torch.distributed reports the end of a broadcast on another. Every
    wait ends, within the timeout, in a result or in an error.

    Args:
        job: its model has the buffers.
        values: of the session; it knows whether the job has failed.
        new_groups: makes process groups over the job's ranks.
    """

    def __init__(self, job: Job, values: Values, new_groups: NewGroups) -> None:
        places = BufferPlaces(job.model)
        self._sync = BufferSync(places, new_groups, job.rank, job.timeout_s, always_at_start=True, has_channel=False)
        self._values, self._rank, self._timeout_s = values, job.global_rank, job.timeout_s
        self._condition = threading.Condition()
        self._error: BaseException | None = None
        self._sync.connect(lambda forward, why: None, self._ended)

    def before_forward(self, trains: bool) -> None:
        """Receive rank 0's buffers if DDP would broadcast them before this forward pass, in training mode or not. Raises a
        `JobError`.
        """
        self._sync.before_forward(self._wait_until, trains, settled=False)

    def forward_raised(self) -> None:
        """Note that the last forward pass in training did not end: what it began with is due again, as under DDP."""
        self._sync.forward_raised()

    def after_forward(self) -> None:
        """Note that a forward pass has ended after which DDP would broadcast rank 0's buffers."""
        self._sync.after_forward()

    def close(self) -> None:
        """Wait for the broadcast in flight and destroy the process group."""
        self._sync.finish(lambda predicate, what: self._wait_until(predicate, what, ahead=0))
        self._sync.close()

    def _ended(self, error: BaseException | None) -> None:
        """Called on a thread of torch.distributed, with None or the error."""
        with self._condition:
            self._error = self._error or error
            self._condition.notify_all()

    def _wait_until(self, predicate: Callable[[], bool], what: str, ahead: int = 1) -> None:
        """Wait until `predicate()` holds. `ahead`: as for `Values.refuse_departures`, which the wait looks at.

        The transport does not notify the condition of its failure, so that the wait polls.
        """
        deadline = time.monotonic() + self._timeout_s
        with given_up(), self._condition:
            while not predicate() and self._error is None and (left_s := deadline - time.monotonic()) > 0:
                if self._values.failure() is not None:
                    break
                self._values.refuse_departures(ahead)
                self._condition.wait(min(left_s, _POLL_S))
            if predicate():
                return
        if self._error is not None:  # a rank is gone; the transport notices shortly and names it
            self._values.await_failure(_VERDICT_S)
        self._values.check()
        self._values.refuse_departures(ahead)
        reason = str(self._error or f"no end within {self._timeout_s:.0f} s").partition("\n")[0]
        text = (
            f"rank {self._rank}: {what} failed: {reason}; a rank has closed its session, or is gone: do all ranks run the same "
            "number of steps?"
        )
        self._values.abort(text)
        raise CommunicationError(text)
