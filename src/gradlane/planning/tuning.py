"""Tuning: tries sizes of one policy while a job trains, as a search proposes them."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from gradlane.core.fields import need, need_int
from gradlane.core.records.tuned import KnobTrial
from gradlane.planning import search
from gradlane.planning.search import Search, Space
from gradlane.planning.trial_runner import TrialRunner, TryOptions
from gradlane.units import format_bytes

Knobs = dict[str, int]
_MOST_SKIPPED = 20
"""Points in a row whose plans were tried: then there is nothing else to try."""


class TuneOptions(TryOptions, frozen=True):
    """How a job is tuned.

    Attributes:
        search: one of `gradlane.planning.search.NAMES`.
        seed: seed of that search.
    """

    search: str = search.DEFAULT
    seed: int = 0

    def __post_init__(self) -> None:
        need(self.search in search.NAMES, "search", self.search, f"one of {', '.join(search.NAMES)}")
        super().__post_init__()
        need_int("seed", self.seed, 0, 2**32 - 1)


class _Sizes:
    """Turns a search's points into knobs. Those that give a plan that was tried count as it did, and are not tried."""

    def __init__(self, space: Space, searching: Search, plan_of: Callable[[Knobs], Hashable]) -> None:
        self._space, self._search, self._plan_of = space, searching, plan_of
        self._point = space.point(space.start)
        self._plan = plan_of(space.start)
        self._took_ns: dict[Hashable, int] = {}  # by plan

    def ask(self) -> Knobs | None:
        for _ in range(_MOST_SKIPPED):
            self._point = self._search.ask()
            knobs = self._space.knobs(self._point)
            self._plan = self._plan_of(knobs)
            if self._plan not in self._took_ns:
                return knobs
            self._search.tell(self._point, self._took_ns[self._plan])
        return None

    def tell(self, iteration_ns: int) -> None:
        self._took_ns[self._plan] = iteration_ns
        self._search.tell(self._point, iteration_ns)


class Tuning(TrialRunner[Knobs]):
    """One tuning run: the policy's own sizes first, then those that a search proposes.

    Args:
        space: of the sizes.
        searching: proposes points of it.
        options: how they are tried.
        plan_of: stands for the plan that sizes give; equal plans are tried once.
    """

    def __init__(self, space: Space, searching: Search, options: TuneOptions, plan_of: Callable[[Knobs], Hashable]) -> None:
        super().__init__(space.start, _Sizes(space, searching, plan_of), options)
        self._space = space

    @property
    def knobs(self) -> Knobs:
        """The knobs in force."""
        return self.choice

    @property
    def trials(self) -> list[KnobTrial]:
        return [KnobTrial(attempt.choice, attempt.times_ns, attempt.cut) for attempt in self.attempts]

    def describe(self) -> str:
        """One line on what is in force and why."""
        sizes = ", ".join(
            f"{name}={format_bytes(value) if name.endswith('_bytes') else value}" for name, value in self.knobs.items()
        )
        gain = self.compared(self.start, "the given sizes") if self.knobs != self.start else "as given"
        now_ns = self.median_ns(self.knobs) or 0
        return (
            f"{self._space.policy.name} tuned in {len(self.attempts)} trials, {self.iterations} iterations, "
            f"{self.cost}: {sizes}, {now_ns / 1e6:.3g} ms an iteration, {gain}"
        )
