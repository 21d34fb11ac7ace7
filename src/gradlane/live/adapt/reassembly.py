"""Reassembly: Prophet's blocks made anew while it trains, when its monitor says that bandwidth or profile have moved
(Prophet, ICPP '21, §4.2). The monitor is passive and looks at every iteration.
"""

from __future__ import annotations

import logging

from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.core.stepwise import describe
from gradlane.live.adapt.controller import ControlDecision, ControlDecisions, silence_of
from gradlane.live.adapt.profiling import Planner
from gradlane.live.adapt.watch import Watch
from gradlane.live.backends.base import Backend
from gradlane.live.comm.driver import Driver
from gradlane.live.comm.recorder import Recorder, now_ns
from gradlane.planning.monitor import Moved
from gradlane.units import format_rate

log = logging.getLogger("gradlane")


class Reassembly:
    """Owned by a session; used on the training thread between iterations only."""

    over = False  # it goes on watching
    settled = True

    def __init__(self, rank: int, policy: Policy, stream_ordered: bool) -> None:
        self._rank, self._policy, self._stream_ordered = rank, policy, stream_ordered
        self._words = ControlDecisions()
        self._since_ns = 0
        self._moved: Moved | None = None

    def start(self, planner: Planner, recorder: Recorder) -> None:
        if self._rank == 0:
            assert planner.profile is not None
            log.info("gradlane: %s", describe(planner.profile))
            self._watch = Watch(recorder, planner.network, self._stream_ordered)
        self._since_ns = now_ns()

    def turn(self, planner: Planner, driver: Driver, backend: Backend) -> Plan | None:
        took_ns = now_ns() - self._since_ns
        word = policy = None
        if self._rank == 0:
            # what has moved stays moved until it may be said
            assert planner.profile is not None
            self._moved = self._watch.observe(driver.plan, planner.profile, took_ns) or self._moved
        if self._words.is_due(driver):
            if self._rank == 0:
                word = ControlDecision.SETTLED if self._moved is None else ControlDecision.CHANGE
                policy = self._moved_on(planner)
            word = self._words.say(driver, word, silence_of(took_ns))
        plan = None
        if word is not None and ControlDecision.CHANGE in word:
            plan = planner.change(policy, backend, driver.failures.collective)
        self._since_ns = now_ns()
        return plan

    def _moved_on(self, planner: Planner) -> Policy | None:
        moved, self._moved = self._moved, None
        if moved is None:
            return None
        assert planner.profile is not None
        planner.network = self._watch.network
        planner.profile = self._watch.profile(planner.profile, moved)
        self._watch.settle()
        rate = format_rate(planner.network.bytes_per_second)
        log.warning("gradlane: %s blocks are assembled anew for %s: %s", self._policy.name, rate, moved)
        return self._policy

    def record(self) -> None:
        """Nothing is tried."""

    def close(self) -> None:
        """Nothing of it runs by itself."""
