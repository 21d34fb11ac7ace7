"""Plan controllers: what may replace the plan while a session trains, on all ranks at the same
iteration boundary.

How rank 0 says so is in `decisions.py`.
"""

from __future__ import annotations

from typing import Protocol

from gradlane.core.plan import Plan
from gradlane.core.records.search_log import SearchLog
from gradlane.core.records.tuned import Tuned
from gradlane.live.adapt.profiling import Planner
from gradlane.live.backends.base import Backend
from gradlane.live.comm.driver import Driver
from gradlane.live.comm.recorder import Recorder


class PlanController(Protocol):
    """Decides between two iterations whether the plan changes.

    Owned by a session, which calls it on the training thread.
    """

    @property
    def over(self) -> bool:
        """Whether the plan is final. The same on all ranks."""

    @property
    def settled(self) -> bool:
        """Whether no plan is being tried. The same on all ranks."""

    def start(self, planner: Planner, recorder: Recorder) -> None:
        """The session calls this once, when its first plan has come into force."""

    def decide(self, planner: Planner, driver: Driver, backend: Backend) -> Plan | None:
        """Agree with the other ranks on the plan of the next iteration. Every rank calls it between
        two iterations.

        Returns:
            The plan to take up, or None to keep the one in force.
        """

    def record(self) -> Tuned | SearchLog | None:
        """What rank 0 has tried and found so far; None on other ranks."""

    def close(self) -> None:
        """The session ends."""
