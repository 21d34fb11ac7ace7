"""Parts: what one session is made of, for those that carry out its passes and steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from gradlane.core.plan import Plan
from gradlane.errors import JobError, UnsupportedError
from gradlane.live.adapt.controller import PlanController
from gradlane.live.adapt.profiling import Planner
from gradlane.live.backends.base import Backend
from gradlane.live.comm.driver import Driver
from gradlane.live.comm.failures import Failures
from gradlane.live.comm.recorder import Recorder
from gradlane.live.comm.turn import given_up
from gradlane.live.session.console import ONCE
from gradlane.live.session.deferred_step import DeferredStep
from gradlane.live.session.finite import Unchecked
from gradlane.live.session.gpu import Gpu
from gradlane.live.session.gradients import Gradients
from gradlane.live.session.job import Job
from gradlane.live.session.measuring import Measuring
from gradlane.live.session.metrics import Meter
from gradlane.live.session.module_buffers import BufferSync
from gradlane.live.session.step_observer import StepObserver
from gradlane.live.session.torch_actions import TorchActions
from gradlane.live.session.tracked import Tracked
from gradlane.live.session.uneven import UnevenInputs
from gradlane.live.session.updates import Updates

log = logging.getLogger("gradlane")


@dataclass
class Parts:
    """The parts of one session, and what all of them have to know.

    Args:
        job: the model and optimizers on this rank.
        backend: carries the messages.
        driver: carries out the plan.
        recorder: keeps the times of what happens.
        planner: makes the plans, and measures the profile for them.
        controller: changes the plan while the job trains; None to keep it.
        verifier: copies values and compares them with DDP's, or ignores them.
        buffers: keeps the model's buffers equal to rank 0's; None to leave them alone.
        measuring: measures the first iterations.
        finite: refuses gradients that are not finite, or does not look at them.
        gradients: what stands in `.grad`.
        actions, updates: the deferred updates, and what is done about them.
        gpu: what CUDA graphs and streams do.
        meter: counts what steps take.
        may_cross: updates may be deferred past `step()`, if the plan says so.

    Attributes:
        plan: in force.
        tracked: the trained parameters, in the plan's order.
        tracked_of: the same by id of the parameter.
        settled: the policy's own plan is in force.
        crosses: updates are deferred.
        was_late: `step()` was called before all sums had arrived, so that there was something to defer.
        uneven: inside `join()`.
        left_alone: passes are of this rank alone.
    """

    job: Job
    backend: Backend
    driver: Driver
    recorder: Recorder
    planner: Planner
    controller: PlanController | None
    verifier: StepObserver
    buffers: BufferSync | None
    measuring: Measuring
    finite: Unchecked
    gradients: Gradients
    actions: TorchActions
    updates: Updates[DeferredStep]
    gpu: Gpu
    meter: Meter
    may_cross: bool
    plan: Plan = field(init=False)
    tracked: Sequence[Tracked] = ()
    tracked_of: dict[int, Tracked] = field(default_factory=dict)
    settled: bool = False
    crosses: bool = False
    was_late: bool = False
    uneven: UnevenInputs | None = None
    left_alone: bool = False
    _told: set[str] = field(default_factory=set)

    @property
    def failures(self) -> Failures:
        """The failure of the job, and waits."""
        return self.driver.failures

    def keep_the_barrier(self) -> None:
        """Defer no update any more."""
        self.crosses = self.may_cross = False
        self.planner.learn(may_cross=False, always_read=True, norms=None)

    # -- errors and warnings ------------------------------------------------------------------------

    def fail(self, text: str, kind: type[JobError] | type[UnsupportedError] = JobError) -> NoReturn:
        """Raise an error with `text`, and tell the other ranks."""
        self.driver.fail(text, kind)

    def refused_aloud(self, call: Callable[[BufferSync], None]) -> None:
        """Call `call` with the buffers, if there are any; tell the other ranks if it raises `UnsupportedError`."""
        if self.buffers is None:
            return
        try:
            with self.failures.explained("the broadcast of the model's buffers"):
                call(self.buffers)
        except UnsupportedError as error:
            self.fail(str(error), UnsupportedError)

    def tell(self, key: str, text: str) -> None:
        """Log `text` as a warning on rank 0, once for each `key`, and once in this process (`console.py`)."""
        if key not in self._told and self.job.rank == 0:
            with given_up():  # a thread that has logging's lock may want to show a parameter
                log.warning("gradlane: %s", text, extra=ONCE)
        self._told.add(key)

    def has_told(self, *keys: str) -> bool:
        """Whether any of `keys` has been logged."""
        return not self._told.isdisjoint(keys)
