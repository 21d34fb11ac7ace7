"""Turns: what may put another plan in force while a session trains, on all ranks at one iteration boundary.

At the start of a backward pass rank 0 says over the control channel what is to be done, and every other rank waits for
that word (which costs it nothing that it would not wait for rank 0's gradients in any case). Where nothing is being
tried, rank 0 also says for how many iterations it will say nothing.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Protocol

from gradlane.core.plan import Plan
from gradlane.core.search_log import SearchLog
from gradlane.core.tuned import Tuned
from gradlane.live.adapt.profiling import Planner
from gradlane.live.backends.base import Backend
from gradlane.live.comm.driver import Driver
from gradlane.live.comm.recorder import Recorder


class PlanController(Protocol):
    """Owned by a session; used on the training thread between iterations only."""

    @property
    def over(self) -> bool:
        """Whether the plan stays from now on, on all ranks alike."""

    @property
    def settled(self) -> bool:
        """Whether nothing is being tried, on all ranks alike."""

    def start(self, planner: Planner, recorder: Recorder) -> None:
        """The first plan is in force from now on."""

    def turn(self, planner: Planner, driver: Driver, backend: Backend) -> Plan | None:
        """All ranks, between two iterations: the plan to take up, if it is another."""

    def record(self) -> Tuned | SearchLog | None:
        """What was tried and found so far; None on other ranks than 0."""

    def close(self) -> None:
        """The session ends."""


class ControlDecision(IntFlag):
    """What rank 0 says."""

    STAY = 0
    CHANGE = 1
    SETTLED = 2


_SILENCE_SHIFT = 8
_WORD_EVERY_NS, _MOST_SILENCE = 250_000_000, 64  # while nothing is tried


def silence_of(iteration_ns: int) -> int:
    """For how many iterations of that length nothing need be said where nothing is tried."""
    return min(_MOST_SILENCE, max(1, _WORD_EVERY_NS // max(1, iteration_ns)))


class ControlDecisions:
    """Rank 0's words to one session, and when the next is due."""

    def __init__(self) -> None:
        self._next = 0

    def is_due(self, driver: Driver) -> bool:
        """Whether a word is said before the next iteration, on all ranks alike."""
        return driver.iteration + 1 >= self._next

    def say(self, driver: Driver, word: ControlDecision | None, silence: int = 1) -> ControlDecision:
        """Rank 0's `word` (None on other ranks); the next comes after `silence` iterations."""
        said = driver.decide(None if word is None else word | silence << _SILENCE_SHIFT)
        self._next = driver.iteration + 1 + (said >> _SILENCE_SHIFT)
        return ControlDecision(said & ((1 << _SILENCE_SHIFT) - 1))
