"""Another plan in every second iteration, where `auto` would simulate for longer than a loop here takes."""

from __future__ import annotations

import itertools

from gradlane import policies
from gradlane.core.plan import Plan
from gradlane.live.adapt.decisions import ControlDecision, ControlDecisions
from gradlane.live.adapt.profiling import Planner
from gradlane.live.backends.base import Backend
from gradlane.live.comm.driver import Driver
from gradlane.live.comm.recorder import Recorder

_EVERY = 2  # iterations


class Hopping:
    """Rank 0 goes through plans that cross the barrier, and says so in decisions as `auto` announces them.

    Where the session has several backends, each plan comes over another one than the plan before.
    """

    over, settled = False, True

    def __init__(self, rank: int) -> None:
        self._rank, self._turn = rank, 0
        self._decisions = ControlDecisions()
        self._policies = itertools.cycle(
            [
                policies.get("blocks", least_bytes=4000, most_bytes=8000),
                policies.get("p3", slice_bytes=3000),
                policies.get("bytescheduler", partition_bytes=2000, credit_bytes=8000),
            ]
        )

    def start(self, planner: Planner, recorder: Recorder) -> None:
        pass

    def decide(self, planner: Planner, driver: Driver, backend: Backend) -> Plan | None:
        if not self._decisions.is_due(driver):
            return None
        self._decisions.announce(driver, ControlDecision.CHANGE if self._rank == 0 else None, _EVERY)
        self._turn += 1
        over = planner.places[self._turn % len(planner.places)].backend
        return planner.change(next(self._policies) if self._rank == 0 else None, backend, driver.failures.collective, over)

    def record(self) -> None:
        return None

    def close(self) -> None:
        pass
