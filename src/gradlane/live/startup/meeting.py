"""Meeting: the ranks of an attachment connect the control channel before anything else.

From then on each of them hears at once of what becomes of the others, whatever `attach` waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from gradlane.errors import GradlaneError, JobError
from gradlane.live.comm.control_channel import ControlChannel
from gradlane.live.comm.coordination import Coordination
from gradlane.live.comm.failures import Failures
from gradlane.live.session.job import Job
from gradlane.live.startup.lifecycle import attach_failed


class Opened(Protocol):
    """What `attach` has opened, to be closed if it fails."""

    def close(self, failure: JobError | None) -> None:
        """Give it back because of `failure`."""


def meet(job: Job, store: Any, stall_timeout_s: float) -> Coordination:
    """Meet the other ranks (collective).

    Args:
        job: what is attached on this rank.
        store: of this attachment.
        stall_timeout_s: seconds after which a rank that says nothing is an error.

    Returns:
        The coordination with them; its `failures.collective` waits for what they take part in.

    Raises:
        MismatchError: a rank did not come within `job.timeout_s`.
        JobError: rank 0 cannot be reached, or a rank that had come is gone or has failed.
    """
    channel = partial(ControlChannel, store, job.rank, job.world, job.timeout_s, stall_timeout_s)
    try:
        return Coordination(job.rank, Failures(job.rank, job.timeout_s, job.device), channel)
    except BaseException:
        attach_failed()
        raise


@contextmanager
def ending_together(coordination: Coordination) -> Iterator[list[Opened]]:
    """If the block raises, tell the other ranks, close what was put into the list, and leave.

    What gradlane refuses it refuses on every rank; each then raises its own error. A thread of the
    data plane that still runs when the interpreter ends would abort the process.
    """
    opened: list[Opened] = []
    try:
        yield opened
    except BaseException as error:
        if isinstance(error, JobError) or not isinstance(error, GradlaneError):
            coordination.abort(error)
            attach_failed()
        for each in opened:
            each.close(error if isinstance(error, JobError) else JobError(f"attach failed: {error!r}"))
        coordination.channel.close()
        raise
