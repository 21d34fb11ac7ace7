"""Departures: which ranks have closed their sessions, so that nobody waits for gradients that will not come.

A store of torch.distributed blocks its caller while the process that keeps it stands still. So a thread of its own talks to it.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from gradlane.live.session.job import Job

_LOOK_S = 1.0
_ANY = "left"  # the key that is there once a rank has left; "left/RANK" has its iterations

Departure = tuple[int, int]
"""The global rank of a rank that has closed its session, and after how many iterations."""


class Departures:
    """The ranks of one job that have closed their sessions.

    Args:
        job: of this rank.
        store: of torch.distributed. Only the ranks of the job write there.
        staleness: iterations that a rank may be ahead of the slowest; None for any number, so that nobody is missed.

    Attributes:
        rank: of this process in the whole job.
    """

    def __init__(self, job: Job, store: Any, staleness: int | None) -> None:
        self._job, self._store, self._staleness = job, store, staleness
        self.rank = job.global_rank
        self._left: dict[int, int] = {}  # iterations, by rank
        self._looks = False
        self._closed = threading.Event()

    def leave(self, iterations: int) -> None:
        """This rank closes its session after so many iterations."""
        if self._staleness is not None:
            self._run(lambda: self._tell(iterations))

    def before(self, iteration: int) -> Departure | None:
        """A rank that closed before sending its gradients for `iteration`, as far as is known; None if there is none.

        The first call begins to look.
        """
        if self._staleness is None:
            return None
        if not self._looks:
            self._looks = True
            self._run(self._look)
        for rank, iterations in list(self._left.items()):
            if iterations <= iteration - self._staleness:
                return self._job.ranks[rank], iterations
        return None

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _run(self, act: Any) -> None:
        threading.Thread(target=act, name="gradlane-departures", daemon=True).start()

    def _tell(self, iterations: int) -> None:
        with contextlib.suppress(RuntimeError):  # who keeps the store may be gone
            self._store.set(f"{_ANY}/{self._job.rank}", str(iterations))
            self._store.set(_ANY, "1")

    def _look(self) -> None:
        others = [rank for rank in range(self._job.world) if rank != self._job.rank]
        with contextlib.suppress(RuntimeError):
            while not self._closed.wait(_LOOK_S):
                if self._store.check([_ANY]):
                    for rank in others:
                        key = f"{_ANY}/{rank}"
                        if rank not in self._left and self._store.check([key]):
                            self._left[rank] = int(self._store.get(key))
