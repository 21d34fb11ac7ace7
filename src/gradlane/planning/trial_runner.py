"""TrialRunner: decides which choice a running job tries next, from its iteration times.

It has no clock; callers hand times in. Choices may be sizes (`tuning`) or whole policies
(`choosing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Generic, Protocol, TypeVar

import msgspec

from gradlane.core.fields import need, need_int
from gradlane.core.records.speedup import Speedup, disturbed

Choice = TypeVar("Choice")

# a trial is cut if its fastest iteration is this many times the best median: after one iteration,
# two, more; those in which it settles count, too
_CUT_AT = (3.0, 1.5, 1.25)
_DISAGREE = 1.1  # ratio above which two iterations disagree
_FINALS = 3  # at most this many of the best choices are measured again
_WORTH_A_CHANGE = 0.99


class TryOptions(msgspec.Struct, frozen=True):
    """How choices are tried.

    Attributes:
        trials: the most trials, the starting choice included.
        iterations: measured iterations of a trial; its value is their median. One more is measured if
            it is an even number, the two in the middle disagree, and the trial may be the best.
        settle: iterations after a change that are not measured.
        loss: no trial starts once this many iterations' time is lost, see `TrialRunner.lost`.
        final_iterations: measured iterations when a choice is measured again; None: as
            `iterations`.
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
        """The next choice to try, or None if none is left."""

    def tell(self, iteration_ns: int) -> None:
        """The last choice asked for (at first: the starting choice) has this median iteration time."""


@dataclass(frozen=True)
class Attempt(Generic[Choice]):
    """Some iterations with one choice.

    Attributes:
        choice: what was in force.
        times_ns: the measured iterations' times.
        cut: whether the trial was stopped early because it was clearly slower.
    """

    choice: Choice
    times_ns: tuple[int, ...]
    cut: bool = False


class TrialRunner(Generic[Choice]):
    """One run of trials: the starting choice first, then what is proposed.

    The owner runs `choice`, reports each iteration to `observe`, and switches to the new `choice`
    if that returns True, until `over`. Then `choice` is the best one.

    A bad trial costs little. It is cut once its first two iterations, of which it settles in one, took 1.5 times the best
    median, or more of them 1.25 times. No trial starts once `loss` iterations' time is lost.

    A lucky trial does not win, and an unlucky one still may. After the last trial the best choice is measured again.
    If it does not hold, the next best follows, and those that were faster but for one disturbed iteration. The
    starting choice is measured again last, cut as any trial is. Only choices that were measured twice are kept, and
    the median over all their iterations counts. A choice must be faster than the starting one by 1 %.

    Args:
        start: the starting choice.
        proposals: where further choices come from.
        options: how they are tried.
        in_force: whether `start` has been in force already, so that it need not settle.
    """

    def __init__(self, start: Choice, proposals: Proposals[Choice], options: TryOptions, in_force: bool = False) -> None:
        self._start, self._proposals, self._options = start, proposals, options
        self._finals: list[Choice] | None = None
        self.choice: Choice = start
        self.attempts: list[Attempt[Choice]] = []
        self.over = False
        self.lost = 0.0
        """What the trials have cost so far, in iterations of the starting choice: how much longer slower choices took, less
        how much sooner faster ones were done.

        Each trial counts by its median; of two iterations in the middle the faster one counts. So a busy machine or a pause of
        the script costs a choice nothing.
        """
        self.iterations = 0
        """Iterations observed so far."""
        self._times: list[int] = []
        self._seen_ns: list[int] = []  # the same, and those in which the trial settled
        self._settling = 0 if in_force else options.settle

    def observe(self, iteration_ns: int) -> bool:
        """Report that an iteration with `choice` took `iteration_ns`.

        Returns:
            Whether `choice` has changed.
        """
        assert not self.over, "the trials are over"
        self.iterations += 1
        self._seen_ns.append(iteration_ns)
        best_ns = self.best_ns
        if self._settling:
            self._settling -= 1
            return False
        self._times.append(iteration_ns)
        bad = False
        # choices that are measured again were good before, except for the starting one
        if best_ns is not None and (self._finals is None or self.choice == self._start):
            bad = min(self._seen_ns) > best_ns * _CUT_AT[min(len(self._seen_ns), len(_CUT_AT)) - 1]
        wanted = self._options.iterations
        if self._finals is not None:
            wanted = self._options.final_iterations or wanted
        if not bad and (len(self._times) < wanted or (len(self._times) == wanted and self._is_in_doubt(best_ns))):
            return False
        return self._end_trial(cut=bad and len(self._times) < wanted)

    def _is_in_doubt(self, best_ns: int | None) -> bool:
        """Whether one iteration more would tell more than the mean of the two in the middle, which disagree."""
        slower = sorted(self._times)[len(self._times) // 2]
        faster = sorted(self._times)[(len(self._times) - 1) // 2]
        return slower > faster * _DISAGREE and (best_ns is None or min(self._times) < best_ns)

    def _end_trial(self, cut: bool) -> bool:
        attempt = Attempt(self.choice, tuple(self._times), cut)
        took_ns = max(1, round(median(attempt.times_ns)))
        if self.choice != self._start and self._of(self._start):
            self.lost += len(self._seen_ns) * (median_low(self._seen_ns) / max(1, self._undisturbed_ns(self._start)) - 1)
        self.attempts.append(attempt)
        self._times, self._seen_ns, self._settling = [], [], self._options.settle
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
            self.choice = self._kept(self._best([self._start, *self._finals], worth=_WORTH_A_CHANGE))
        else:
            self._finals.append(final)
            self.choice = final
        return self.choice != before

    def _next_final(self) -> Choice | None:
        """What to measure again: the best choice not yet repeated, what may be faster still, then the start."""
        assert self._finals is not None
        best = self._best()
        if best == self._start:
            return None
        if len(self._finals) < _FINALS:
            if best not in self._finals:
                return best
            left = [each.choice for each in self.attempts if each.choice not in (*self._finals, self._start)]
            unlucky = min(left, key=self._undisturbed_ns, default=None)
            best_ns = self.median_ns(best)
            if unlucky is not None and best_ns is not None and self._undisturbed_ns(unlucky) < best_ns:
                return unlucky
        return self._start if self._start not in self._finals else None

    def _kept(self, best: Choice) -> Choice:
        """What is kept in the end: `best`, which was measured twice and is the fastest of those, or another one."""
        return best

    def _undisturbed_ns(self, choice: Choice) -> int:
        """The median, or of two in the middle the faster one: what disturbs an iteration makes it slower."""
        return median_low(time for attempt in self._of(choice) for time in attempt.times_ns)

    # -- what was found ----------------------------------------------------------------------------------

    @property
    def start(self) -> Choice:
        """The starting choice."""
        return self._start

    @property
    def cost(self) -> str:
        """What the trials have cost so far, for people."""
        if self.lost > -0.05:
            return f"{abs(self.lost):.1f} iterations' time lost"
        # a choice that was slower when it was measured first has not won what others took less
        return "no time lost" if self.choice == self._start else f"{-self.lost:.1f} iterations' time won"

    def median_ns(self, choice: Choice) -> int | None:
        """The median over all measured iterations with `choice`, or None if there are none."""
        times = [time for attempt in self._of(choice) for time in attempt.times_ns]
        return round(median(times)) if times else None

    def compared(self, to: Choice, name: str) -> str | None:
        """How many times as fast as `to` the current choice was, for people.

        The first trial of one is compared with the first of the other, and so on: those that were
        measured again were measured side by side.

        Args:
            to: a choice.
            name: what to call it.

        Returns:
            A clause, which says it where the trials of `to` took different times; None unless both
            were measured twice.
        """
        theirs = [median(attempt.times_ns) for attempt in self._of(to)]
        speedup = self.speedup(self.choice, to)
        if speedup is None or speedup.turns == 1:  # the ratio of one turn says little
            return None
        said = f"{speedup} as {name}"
        differing = disturbed(theirs)
        return said if differing is None else f"{said} ({differing})"

    def speedup(self, choice: Choice, to: Choice) -> Speedup | None:
        """How many times as fast as `to` a choice was, trial by trial; None if one of both was not measured."""
        own, theirs = ([median(attempt.times_ns) for attempt in self._of(each)] for each in (choice, to))
        return Speedup.of(theirs, own) if own and theirs else None

    def _of(self, choice: Choice) -> list[Attempt[Choice]]:
        return [attempt for attempt in self.attempts if attempt.choice == choice]

    @property
    def best_ns(self) -> int | None:
        """The least median so far, or None."""
        return self.median_ns(self._best()) if self.attempts else None

    def _best(self, among: Sequence[Choice] | None = None, worth: float = 1.0) -> Choice:
        """The choice of least median; `start` unless another's is below `worth` of its median."""
        start_ns = self.median_ns(self._start)
        assert start_ns is not None, "the given choice is tried first"
        best, best_ns = self._start, start_ns * worth
        for choice in [attempt.choice for attempt in self.attempts] if among is None else among:
            time_ns = self.median_ns(choice)
            if time_ns is not None and time_ns < best_ns:
                best, best_ns = choice, time_ns
        return best
