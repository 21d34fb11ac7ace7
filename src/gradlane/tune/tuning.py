"""Tuning: which sizes a running job tries next, from how long its iterations take. No clock: times are handed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from gradlane.core.checking import need, need_int
from gradlane.core.tuned import Trial
from gradlane.tune import search
from gradlane.tune.search import Search, Space
from gradlane.units import format_bytes

# a trial whose fastest iteration so far is so many times the best known median is ended: after one, two, more of them
_CUT_AT = (3.0, 1.5, 1.25)
_FINALS = 3  # of the sizes that look best, so many are measured again at most
_FAR = 1.25  # given sizes that take so many times the best median need no second look
_WORTH_A_CHANGE = 0.99


class TuneOptions(msgspec.Struct, frozen=True):
    """How a job is tuned.

    search: one of `gradlane.tune.search.NAMES`. trials: at most so many, the given sizes included. iterations: measured
    a trial; its value is their median. settle: iterations after a change that are not measured. loss: trying ends
    once so many iterations' time, of the best known, was lost to worse ones.
    """

    search: str = search.DEFAULT
    trials: int = 12
    iterations: int = 5
    settle: int = 1
    loss: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        need(self.search in search.NAMES, "search", self.search, f"one of {', '.join(search.NAMES)}")
        need_int("trials", self.trials, 2, 10_000)
        need_int("iterations", self.iterations, 1, 10_000)
        need_int("settle", self.settle, 0, 10_000)
        need(isinstance(self.loss, (int, float)) and self.loss > 0, "loss", self.loss, "iterations, more than 0")
        need_int("seed", self.seed, 0, 2**32 - 1)


class Tuning:
    """One tuning run: trials of the sizes that a search proposes, the given ones first.

    Whoever owns it runs `knobs`, reports each iteration to `observe`, and changes to the new `knobs` where that says
    so, until `over`; then `knobs` are the best known.

    How much a bad trial can cost: it is ended after its first measured iteration if that took three times the best
    known median, after the second if both took half as long again, then if all took a quarter longer; so `settle` and
    one iteration of a very bad choice, and those that the simulator expects to be very bad are not proposed. Of all
    trials together: no further one begins once more than `loss` iterations' time was lost.

    How luck is kept out: after the last trial the sizes that look best are measured once more, the next best where they
    do not hold, and then the given ones unless they are far off; only sizes measured twice are kept, and what counts is
    the median over all iterations with the same sizes. Sizes that are not faster by a hundredth are not worth a change.
    """

    def __init__(self, space: Space, searching: Search, options: TuneOptions) -> None:
        self._space, self._search, self._options = space, searching, options
        self._start = space.start
        self._point = space.point(self._start)
        self._finals: list[dict[str, int]] | None = None
        self.knobs: dict[str, int] = self._start
        self.trials: list[Trial] = []
        self.over = False
        self.lost = 0.0
        """Iterations' time lost so far to sizes worse than the best known, in iterations of the best known."""
        self.iterations = 0
        """How many were observed."""
        self._times: list[int] = []
        self._settling = options.settle

    def observe(self, iteration_ns: int) -> bool:
        """An iteration with `knobs` took so long. True where `knobs` are others from now on."""
        assert not self.over, "the tuning is over"
        self.iterations += 1
        best_ns = self.best_ns
        if best_ns is not None:
            self.lost += max(0.0, iteration_ns / max(1, best_ns) - 1)
        if self._settling:
            self._settling -= 1
            return False
        self._times.append(iteration_ns)
        bad = False
        if best_ns is not None and self._finals is None:  # what is measured again was found good before
            bad = min(self._times) > best_ns * _CUT_AT[min(len(self._times), len(_CUT_AT)) - 1]
        if len(self._times) < self._options.iterations and not bad:
            return False
        return self._end_trial(cut=bad and len(self._times) < self._options.iterations)

    def _end_trial(self, cut: bool) -> bool:
        trial = Trial(self.knobs, tuple(self._times), cut)
        self.trials.append(trial)
        self._times, self._settling = [], self._options.settle
        before = self.knobs
        if self._finals is None:
            self._search.tell(self._point, max(1, trial.iteration_ns))
            if len(self.trials) < self._options.trials and self.lost < self._options.loss:
                self._point = self._search.ask()
                self.knobs = self._space.knobs(self._point)
                return self.knobs != before
            self._finals = []
        final = self._next_final()
        if final is None:
            self.over = True
            self.knobs = self._best([self._start, *self._finals], worth=_WORTH_A_CHANGE)
        else:
            self._finals.append(final)
            self.knobs = final
        return self.knobs != before

    def _next_final(self) -> dict[str, int] | None:
        """What is to be measured once more: what looks best, until that has been; and then the given sizes, if near."""
        assert self._finals is not None
        best = self._best()
        if best == self._start:
            return None
        if best not in self._finals and len(self._finals) < _FINALS:
            return best
        best_ns, start_ns = self.median_ns(best), self.median_ns(self._start)
        assert best_ns is not None
        assert start_ns is not None
        return self._start if self._start not in self._finals and start_ns < best_ns * _FAR else None

    # -- what was found ----------------------------------------------------------------------------------

    def median_ns(self, knobs: Mapping[str, int]) -> int | None:
        """The median over all measured iterations with these sizes, or None where there are none."""
        times = [time for trial in self.trials if trial.knobs == knobs for time in trial.times_ns]
        return round(median(times)) if times else None

    @property
    def best_ns(self) -> int | None:
        """The least median so far."""
        return self.median_ns(self._best()) if self.trials else None

    def _best(self, among: Sequence[dict[str, int]] | None = None, worth: float = 1.0) -> dict[str, int]:
        """The sizes with the least median (of those `among`); the given ones unless others take less than `worth` of theirs."""
        start_ns = self.median_ns(self._start)
        assert start_ns is not None, "the given sizes are tried first"
        best, best_ns = self._start, start_ns * worth
        for knobs in [trial.knobs for trial in self.trials] if among is None else among:
            time_ns = self.median_ns(knobs)
            if time_ns is not None and time_ns < best_ns:
                best, best_ns = knobs, time_ns
        return best

    def describe(self) -> str:
        """One line on what is in force and why."""
        sizes = ", ".join(
            f"{name}={format_bytes(value) if name.endswith('_bytes') else value}" for name, value in self.knobs.items()
        )
        start_ns, best_ns = self.median_ns(self._start) or 0, self.median_ns(self.knobs) or 0
        gain = f"{start_ns / best_ns:.2f} times as fast as as given" if best_ns and self.knobs != self._start else "as given"
        return (
            f"{self._space.policy.name} tuned in {len(self.trials)} trials, {self.iterations} iterations, "
            f"{self.lost:.1f} iterations' time lost: {sizes}, {best_ns / 1e6:.3g} ms an iteration, {gain}"
        )
