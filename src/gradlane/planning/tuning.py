"""Tuning: tries sizes of one policy while a job trains, as a search proposes them."""

from __future__ import annotations

from gradlane.core.fields import need, need_int
from gradlane.core.records.tuned import KnobTrial
from gradlane.planning import search
from gradlane.planning.search import Search, Space
from gradlane.planning.trial_runner import TrialRunner, TryOptions
from gradlane.units import format_bytes

Knobs = dict[str, int]


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
    """Turns a search's points into knobs."""

    def __init__(self, space: Space, searching: Search) -> None:
        self._space, self._search = space, searching
        self._point = space.point(space.start)

    def ask(self) -> Knobs:
        self._point = self._search.ask()
        return self._space.knobs(self._point)

    def tell(self, iteration_ns: int) -> None:
        self._search.tell(self._point, iteration_ns)


class Tuning(TrialRunner[Knobs]):
    """One tuning run: the policy's own sizes first, then those that a search proposes."""

    def __init__(self, space: Space, searching: Search, options: TuneOptions) -> None:
        super().__init__(space.start, _Sizes(space, searching), options)
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
