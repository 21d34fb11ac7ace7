"""Departures: which ranks have closed their sessions, so that nobody waits for gradients that will not come."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist

from gradlane.live.session.job import Job

Departure = tuple[int, int]
"""The global rank of a rank that has closed its session, and after how many iterations."""


class Departures:
    """The ranks of one job that have closed their sessions.

    Args:
        job: of this rank.
        store: of torch.distributed, in which the ranks of the job alone write.
        staleness: iterations that a rank may be ahead of the slowest; None for any number.
    """

    def __init__(self, job: Job, store: Any, staleness: int | None) -> None:
        self._job, self._store, self._staleness = job, store, staleness

    def leave(self, iterations: int) -> None:
        """This rank closes its session after so many iterations."""
        with contextlib.suppress(dist.DistError, RuntimeError):  # who keeps the store may be gone
            self._store.set(f"left/{self._job.rank}", str(iterations))

    def before(self, iteration: int) -> Departure | None:
        """A rank that has closed before it has sent what the values of `iteration` are made of; None if there is none."""
        if self._staleness is None:
            return None
        with contextlib.suppress(dist.DistError, RuntimeError):
            for rank in range(self._job.world):
                key = f"left/{rank}"
                if rank != self._job.rank and self._store.check([key]):
                    iterations = int(self._store.get(key))
                    if iterations <= iteration - self._staleness:
                        return self._job.ranks[rank], iterations
        return None
