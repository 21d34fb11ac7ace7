"""Replanning: the session plans again when bandwidth or profile have changed, for policies that ask
for it.

Prophet does (ICPP '21, section 4.2): its monitor is passive, looks at every iteration, and has the
blocks assembled anew.
"""

from __future__ import annotations

import logging

from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.core.stepwise import describe
from gradlane.live.adapt.decisions import ControlDecision, ControlDecisions, quiet_iterations
from gradlane.live.adapt.profiling import Planner
from gradlane.live.adapt.round_clock import RoundClock
from gradlane.live.adapt.watch import Watch
from gradlane.live.backends.base import Backend
from gradlane.live.comm.driver import Driver
from gradlane.live.comm.recorder import Recorder
from gradlane.planning.monitor import Moved
from gradlane.units import format_rate

log = logging.getLogger("gradlane")


class Replanning:
    """A `PlanController` that keeps the policy and plans it again for what rank 0 observes.

    Args:
        rank: of this process.
        policy: the one to plan with, the same on all ranks.
        stream_ordered, on_device: see `Watch`.
    """

    over = False  # the watch goes on until the session ends
    settled = True

    def __init__(self, rank: int, policy: Policy, stream_ordered: bool, on_device: bool) -> None:
        self._rank, self._policy, self._hearing = rank, policy, (stream_ordered, on_device)
        self._decisions = ControlDecisions()
        self._clock = RoundClock()
        self._moved: Moved | None = None

    def start(self, planner: Planner, recorder: Recorder) -> None:
        if self._rank == 0:
            assert planner.profile is not None
            log.info("gradlane: %s", describe(planner.profile))
            self._recorder = recorder
            self._watch = Watch(recorder, planner.places, *self._hearing)
        self._clock.start()

    def decide(self, planner: Planner, driver: Driver, backend: Backend) -> Plan | None:
        took_ns = self._clock.took_ns
        decision = policy = None
        if self._rank == 0:
            # a change is kept until the next decision is due
            assert planner.profile is not None
            ended = self._clock.ended(self._recorder.stepped)
            if ended is not None:
                self._moved = self._watch.observe(driver.plan, planner.profile, ended) or self._moved
        if self._decisions.is_due(driver):
            if self._rank == 0:
                decision = ControlDecision.SETTLED if self._moved is None else ControlDecision.CHANGE
                policy = self._update_planner(planner)
            decision = self._decisions.announce(driver, decision, quiet_iterations(took_ns))
        plan = None
        if decision is not None and ControlDecision.CHANGE in decision:
            plan = planner.change(policy, backend, driver.failures.collective)
        self._clock.start()
        return plan

    def _update_planner(self, planner: Planner) -> Policy | None:
        """Give `planner` the network and profile as they are now. Returns the policy to plan, None
        if nothing has changed.
        """
        moved, self._moved = self._moved, None
        if moved is None:
            return None
        assert planner.profile is not None
        planner.plan_for(self._watch.places())
        planner.profile = self._watch.profile(planner.profile, moved)
        self._watch.settle_after(moved)
        rate = format_rate(planner.network.bytes_per_second)
        log.warning("gradlane: %s plans anew for %s: %s", self._policy.name, rate, moved)
        return self._policy

    def record(self) -> None:
        """Nothing is tried."""

    def close(self) -> None:
        """It has no thread and no process to end."""
