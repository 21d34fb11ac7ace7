"""Simulation: the loop in virtual time that lets workers compute and a fabric carry their messages.

It decides neither what workers compute (`worker`) nor what carries messages (a `fabric.Fabric`);
`servers` and `allreduce` put the parts together.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from gradlane.core.fields import need, need_int
from gradlane.core.timeline import Timeline
from gradlane.sim.fabric import FOREVER, Fabric, Job
from gradlane.sim.passes import PPM
from gradlane.sim.worker import SimulatedWorker

BEGIN_BACKWARD, READY = 0, 1


class Simulation:
    """One run of one or more jobs."""

    def __init__(
        self,
        jobs: Sequence[Job],
        ranks: Sequence[tuple[int, int]],
        fabric: Fabric,
        iterations: int = 3,
        *,
        staleness: int | None = 0,
        jitter: float = 0.0,
        seed: int = 0,
        updates_here: bool = True,
        receives: bool = True,
    ) -> None:
        """Prepare a run.

        Args:
            jobs: the training runs, 1 or more.
            ranks: for each simulated worker the index of its job, and its compute times in
                hundredths of the profile's.
            fabric: what carries messages. The simulation owns it from now on.
            iterations: as in `servers.simulate_jobs`, like `staleness`, `jitter` and `seed`.
            updates_here: whether workers update parameters themselves; else servers do.
            receives: whether timelines have a "receive" span for each message, because sums come
                back apart from sending.

        Raises:
            InputError: an argument is out of its range.
        """
        need_int("iterations", iterations, 1, 10**6)
        need(0 <= jitter < 1, "jitter", jitter, "a part from 0 to below 1")
        if staleness is not None:
            need_int("staleness", staleness, 0, 10**6)
        self._jobs, self._fabric, self._staleness = len(jobs), fabric, staleness
        self._jitter, self._seed = jitter, seed
        self._events = 0
        self._heap: list[tuple[int, int, int, int, int]] = []  # (time, number, what, rank, tensor)
        self._numbers = 0
        self._ranks = [
            SimulatedWorker(number, job, jobs[job].plan, jobs[job].profile, iterations, updates_here, receives)
            for number, (job, _) in enumerate(ranks)
        ]
        self._percent = [percent for _, percent in ranks]
        self._held: set[int] = set()

    @property
    def events(self) -> int:
        """How many steps the run has taken so far, those of the fabric included."""
        return self._events + self._fabric.events

    def awaits(self, message: int) -> bool:
        """Whether a worker waits for the end of `message`, which is in flight, to start another; of the only job."""
        return any(rank.awaits(message) for rank in self._ranks)

    def run(self) -> list[tuple[Timeline, ...]]:
        """Run to the end.

        Returns:
            For each job the timelines of its workers.
        """
        for rank in self._ranks:
            rank.begin_first_forward(self._scale(rank))
            self._at(rank.free_ns, BEGIN_BACKWARD, rank.number, -1)
        while True:
            at_ns = self._heap[0][0] if self._heap else FOREVER
            if at_ns == FOREVER and self._fabric.next_ns() == FOREVER:
                break
            notices = self._fabric.run(min(at_ns, FOREVER - 1))
            for now_ns, number, message, pulled in notices:
                self._events += 1
                rank = self._ranks[number]
                if pulled:
                    self._start(rank, rank.pulled(message, now_ns), now_ns)
                    self._forward(rank)
                    continue
                self._start(rank, rank.pushed(message, now_ns), now_ns)
                if self._staleness and self._held:
                    self._release(rank.job, now_ns)
            if not notices:
                self._next_event()
        assert all(rank.is_last for rank in self._ranks), "the simulation stopped before its end"
        return [tuple(r.timeline() for r in self._ranks if r.job == number) for number in range(self._jobs)]

    def _next_event(self) -> None:
        now_ns, _, what, number, tensor = heapq.heappop(self._heap)
        self._events += 1
        rank = self._ranks[number]
        if what == BEGIN_BACKWARD:
            rank.begin_backward(now_ns)
            for gradient, seen in enumerate(rank.profile.tensors):
                self._at(now_ns + rank.scaled(seen.ready_ns), READY, number, gradient)
        else:
            self._start(rank, rank.ready(tensor, now_ns), now_ns)

    def _start(self, rank: SimulatedWorker, messages: list[int], now_ns: int) -> None:
        for message in messages:
            hand_over = self._fabric.ask if rank.asks_for(message) else self._fabric.hand_over
            hand_over(now_ns, rank.number, message)

    def _forward(self, rank: SimulatedWorker) -> None:
        if self._staleness and rank.waits_to_begin_forward and rank.iteration + 1 > self._slowest(rank.job) + self._staleness:
            self._held.add(rank.number)
            return
        ends_ns = rank.forward(self._scale(rank))
        if ends_ns is not None and not rank.is_last:
            self._at(ends_ns, BEGIN_BACKWARD, rank.number, -1)

    def _slowest(self, job: int) -> int:
        return min(rank.pushed_iterations for rank in self._ranks if rank.job == job)

    def _release(self, job: int, now_ns: int) -> None:
        for number in sorted(self._held):
            rank = self._ranks[number]
            if rank.job == job and rank.iteration + 1 <= self._slowest(job) + (self._staleness or 0):
                self._held.remove(number)
                rank.hold_until(now_ns)
                self._forward(rank)

    def _scale(self, rank: SimulatedWorker) -> int:
        """The compute times of `rank` in the iteration that it begins next, in millionths of the
        profile's.
        """
        factor = 1.0
        if self._jitter:
            # each draw has a seed of its own, so that one rank's delay changes no other's jitter
            draw = random.Random(f"{self._seed} {rank.number} {rank.iteration + 1}")
            factor = draw.uniform(1 - self._jitter, 1 + self._jitter)
        return max(1, round(self._percent[rank.number] * factor * PPM / 100))

    def _at(self, time_ns: int, what: int, rank: int, tensor: int) -> None:
        heapq.heappush(self._heap, (time_ns, self._numbers, what, rank, tensor))
        self._numbers += 1
