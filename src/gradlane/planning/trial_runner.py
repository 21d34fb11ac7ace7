"""Trying: which of several choices a running job takes next, from how long its iterations take. No clock: times are
handed in. What is chosen among is none of its business: sizes (`tuning`), or whole policies (`choosing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, Protocol, TypeVar

import msgspec

from gradlane.core.fields import need, need_int

Choice = TypeVar("Choice")

# a trial whose fastest iteration so far is so many times the best known median is ended: after one, two, more of them
_CUT_AT = (3.0, 1.5, 1.25)
_FINALS = 3  # of the choices that look best, so many are measured again at most
_FAR = 1.25  # the given choice needs no second look where it takes so many times the best median
_WORTH_A_CHANGE = 0.99


class TryOptions(msgspec.Struct, frozen=True):
    """How choices are tried.

    trials: at most so many, the given choice included. iterations: measured a trial; its value is their median.
    final_iterations: when a choice is measured once more, as many where not given. settle: iterations after a change that
    are not measured. loss: trying ends once so many iterations' time, of the best known, was lost to worse ones.
    """

    trials: int = 12
    iterations: int = 5
    settle: int = 1
    loss: float = 30.0
    final_iterations: int | None = None

    def __post_init__(self) -> None:
        need_int("trials", self.trials, 2, 10_000)
        need_int("iterations", self.iterations, 1, 10_000)
        need_int("settle", self.settle, 0, 10_000)
        if self.final_iterations is not None:
            need_int("final_iterations", self.final_iterations, 1, 10_000)
        need(isinstance(self.loss, (int, float)) and self.loss > 0, "loss", self.loss, "iterations, more than 0")


Proposed = TypeVar("Proposed", covariant=True)


class Proposals(Protocol[Proposed]):
    """Where choices come from."""

    def ask(self) -> Proposed | None:
        """What to try next; None where there is nothing left."""

    def tell(self, iteration_ns: int) -> None:
        """What was asked for last (the given choice at first) took so long an iteration."""


@dataclass(frozen=True)
class Attempt(Generic[Choice]):
    """Some iterations with the same choice. times_ns: those measured. cut: ended before its time, as bad."""

    choice: Choice
    times_ns: tuple[int, ...]
    cut: bool = False


class TrialRunner(Generic[Choice]):
    """One run of trials: the given choice first, then what is proposed.

    Whoever owns it runs `choice`, reports each iteration to `observe`, and changes to the new `choice` where that says
    so, until `over`; then `choice` is the best known.

    How much a bad trial can cost: it is ended after its first measured iteration if that took three times the best
    known median, after the second if both took half as long again, then if all took a quarter longer; so `settle` and
    one iteration of a very bad choice. Of all trials together: no further one begins once more than `loss` iterations'
    time was lost.

    How luck is kept out: after the last trial the choices that look best are measured once more, the next best where they
    do not hold, and then the given one unless it is far off; only choices measured twice are kept, and what counts is
    the median over all iterations with the same choice. A choice that is not faster by a hundredth is not worth a change.
    """

    def __init__(self, start: Choice, proposals: Proposals[Choice], options: TryOptions, in_force: bool = False) -> None:
        """in_force: whether the given choice has been for a while, so that it need not settle."""
        self._start, self._proposals, self._options = start, proposals, options
        self._finals: list[Choice] | None = None
        self.choice: Choice = start
        self.attempts: list[Attempt[Choice]] = []
        self.over = False
        self.lost = 0.0
        """Iterations' time lost in trials so far to choices worse than the best known, in iterations of the best known.

        By the median of each trial: what a busy machine adds to an iteration here and there is not lost to a choice.
        """
        self.iterations = 0
        """How many were observed."""
        self._times: list[int] = []
        self._of_trial = 0
        self._settling = 0 if in_force else options.settle

    def observe(self, iteration_ns: int) -> bool:
        """An iteration with `choice` took so long. True where `choice` is another from now on."""
        assert not self.over, "the trials are over"
        self.iterations += 1
        self._of_trial += 1
        best_ns = self.best_ns
        if self._settling:
            self._settling -= 1
            return False
        self._times.append(iteration_ns)
        bad = False
        if best_ns is not None and self._finals is None:  # what is measured again was found good before
            bad = min(self._times) > best_ns * _CUT_AT[min(len(self._times), len(_CUT_AT)) - 1]
        wanted = self._options.iterations
        if self._finals is not None:
            wanted = self._options.final_iterations or wanted
        if len(self._times) < wanted and not bad:
            return False
        return self._end_trial(cut=bad and len(self._times) < wanted)

    def _end_trial(self, cut: bool) -> bool:
        attempt = Attempt(self.choice, tuple(self._times), cut)
        took_ns, best_ns = max(1, round(median(attempt.times_ns))), self.best_ns
        if best_ns is not None:
            self.lost += self._of_trial * max(0.0, took_ns / max(1, best_ns) - 1)
        self.attempts.append(attempt)
        self._times, self._of_trial, self._settling = [], 0, self._options.settle
        before = self.choice
        if self._finals is None:
            self._proposals.tell(took_ns)
            if len(self.attempts) < self._options.trials and self.lost < self._options.loss:
                proposed = self._proposals.ask()
                if proposed is not None:
                    self.choice = proposed
                    return self.choice != before
            self._finals = []
        final = self._next_final()
        if final is None:
            self.over = True
            self.choice = self._best([self._start, *self._finals], worth=_WORTH_A_CHANGE)
        else:
            self._finals.append(final)
            self.choice = final
        return self.choice != before

    def _next_final(self) -> Choice | None:
        """What is to be measured once more: what looks best, until that has been; and then the given choice, if near."""
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

    @property
    def start(self) -> Choice:
        """The given choice."""
        return self._start

    def median_ns(self, choice: Choice) -> int | None:
        """The median over all measured iterations with this choice, or None where there are none."""
        times = [time for attempt in self.attempts if attempt.choice == choice for time in attempt.times_ns]
        return round(median(times)) if times else None

    @property
    def best_ns(self) -> int | None:
        """The least median so far."""
        return self.median_ns(self._best()) if self.attempts else None

    def _best(self, among: Sequence[Choice] | None = None, worth: float = 1.0) -> Choice:
        """The choice with the least median (of those `among`); the given one unless another takes less than `worth` of its."""
        start_ns = self.median_ns(self._start)
        assert start_ns is not None, "the given choice is tried first"
        best, best_ns = self._start, start_ns * worth
        for choice in [attempt.choice for attempt in self.attempts] if among is None else among:
            time_ns = self.median_ns(choice)
            if time_ns is not None and time_ns < best_ns:
                best, best_ns = choice, time_ns
        return best

    def gain(self) -> float:
        """How many times as fast as the given choice the one in force is, by what was measured; 1.0 where unknown."""
        start_ns, now_ns = self.median_ns(self._start), self.median_ns(self.choice)
        return start_ns / now_ns if start_ns and now_ns else 1.0
