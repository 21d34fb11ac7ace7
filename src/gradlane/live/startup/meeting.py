"""Meeting: the ranks of an attachment connect the control channel before anything else.

From then on each of them hears at once of what becomes of the others, whatever `attach` waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from typing import Protocol

import torch.distributed as dist

from gradlane.errors import GradlaneError, JobError
from gradlane.live.backends.addresses import store_address
from gradlane.live.comm.control_channel import ControlChannel
from gradlane.live.comm.coordination import Coordination
from gradlane.live.comm.failures import Failures
from gradlane.live.comm.roll_call import RollCall
from gradlane.live.session.job import Job
from gradlane.live.startup.lifecycle import attach_failed


class Opened(Protocol):
    """What `attach` has opened, to be closed if it fails."""

    def close(self, failure: JobError | None) -> None:
        """Give it back because of `failure`."""


def meet(job: Job, stall_timeout_s: float) -> tuple[RollCall, Coordination]:
    """Meet the other ranks (collective).

    Args:
        job: what is attached on this rank.
        stall_timeout_s: seconds after which a rank that says nothing is an error.

    Returns:
        The roll call, whose store has room for this attachment alone, and the coordination with
        the others; its `failures.collective` waits for what they take part in.

    Raises:
        MismatchError: a rank did not come within `job.timeout_s`.
        JobError: rank 0 cannot be reached, or a rank that had come is gone or has failed.
    """
    # groups with different ranks must not meet one another, and those with the same ranks meet in
    # the order in which their ranks attach
    members = sha256(" ".join(map(str, job.ranks)).encode()).hexdigest()[:16]
    store = dist.distributed_c10d.PrefixStore(f"gradlane/{members}", dist.distributed_c10d._get_default_store())
    roll = RollCall(store, job.rank, job.world, store_address())
    channel = partial(ControlChannel, roll, job.ranks, job.timeout_s, stall_timeout_s)
    try:
        return roll, Coordination(job.global_rank, Failures(job.global_rank, job.timeout_s, job.device), channel)
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
