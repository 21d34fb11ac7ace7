"""Choosing: tries a few policies while a job trains, against the one in force."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from gradlane.core.records.search_log import Choice, PolicyTrial
from gradlane.planning.trial_runner import TrialRunner, TryOptions

# A search round starts no further trial once it has lost this many iterations' time. The last trial may lose about as much,
# so that a job of 100 iterations in which nothing is found loses 2 % of its time at most.
_LOSS = 0.7
# Measured iterations of a trial, and of the repeat of the best: in the first search round, and in
# later ones, which slow down a job that runs well. Many trials of two iterations find more than few
# of three: a round mostly misses what it did not try.
_FIRST, _AGAIN = (2, 3), (2, 2)
PART_OF_TIME = 0.03
"""The fraction of a job's time that search rounds after the first may lose, ..."""
ALLOWANCE_NS = 5 * 10**9
"""... in addition to this much, so that the first few rounds need not wait."""


WORTH_CROSSING = 1.03
"""So many times as fast as the best plan that waits for all updates, a plan that crosses the barrier is kept. Deferred updates
cost the script guards, and whatever reads parameters a look; for less they are not worth it."""


class _Listed:
    """Proposes choices in a given order."""

    def __init__(self, choices: Iterable[Choice]) -> None:
        self._left = list(choices)

    def ask(self) -> Choice | None:
        return self._left.pop(0) if self._left else None

    def tell(self, iteration_ns: int) -> None:
        """Ignored: the order is fixed."""


class Choosing(TrialRunner[Choice]):
    """One search round: tries the current choice, then others; repeats the best and the current.

    Args:
        in_force: the current choice.
        safe: a choice that the winner must not be slower than; it is tried too.
        others: what else to try, in order.
        again: whether this is not the first search round.
        crosses: whether updates are deferred under a choice.
    """

    def __init__(
        self,
        in_force: Choice,
        safe: Choice,
        others: Sequence[Choice],
        again: bool,
        crosses: Callable[[Choice], bool] = lambda choice: False,
    ) -> None:
        listed = [choice for choice in dict.fromkeys((safe, *others)) if choice != in_force]
        once, finally_ = _AGAIN if again else _FIRST
        options = TryOptions(1 + max(1, len(listed)), once, loss=_LOSS, final_iterations=finally_)
        super().__init__(in_force, _Listed(listed), options, in_force=True)
        self._safe, self._crosses = safe, crosses
        self._rival: Choice | None = None  # of a plan that crosses the barrier, the best that does not
        self._passed_over: Choice | None = None  # crosses the barrier, and is faster than what is kept, but not by enough

    def _kept(self, best: Choice) -> Choice:
        """The fastest, unless it is slower than the safe choice trial by trial, or crosses the barrier for too little."""
        by_trials = self.speedup(best, self._safe)
        if by_trials is not None and by_trials.turns > 1 and by_trials.ratio < 1:
            best = self._safe
        best_ns = self.median_ns(best)
        if not self._crosses(best) or best_ns is None:
            return best
        waiting = [each.choice for each in self.attempts if not self._crosses(each.choice)]
        rival = min(waiting, key=lambda choice: self.median_ns(choice) or math.inf, default=None)
        rival_ns = None if rival is None else self.median_ns(rival)
        if rival is None or rival_ns is None:
            return best
        if rival_ns >= best_ns * WORTH_CROSSING:
            self._rival = rival
            return best
        self._passed_over = best
        return rival

    @property
    def tried(self) -> tuple[PolicyTrial, ...]:
        """All trials so far, in order."""
        return tuple(PolicyTrial(attempt.choice, attempt.times_ns, attempt.cut) for attempt in self.attempts)

    def verdict(self, predicted_ns: int | None) -> str:
        """One line on what is kept and why.

        Args:
            predicted_ns: the predicted iteration time of what is kept, if there is a prediction.
        """
        kept_ns = self.median_ns(self.choice)
        assert kept_ns is not None
        said = f"{kept_ns / 1e6:.3g} ms an iteration"
        if predicted_ns is not None:
            said += f" (predicted {predicted_ns / 1e6:.3g})"
        if self._passed_over is not None:
            said += f", {self._passed_over} crosses the barrier and took {self._took(self._passed_over)}, which is not worth it"
        elif self.choice == self._safe:
            said += ", nothing tried was faster"
        elif compared := self.compared(self._safe, str(self._safe)):
            said += f", {compared}"
        if self._rival is not None and self._rival != self._safe:
            said += f"; {self._rival} took {self._took(self._rival)} without crossing the barrier"
        trials = len({str(attempt.choice) for attempt in self.attempts})
        return f"auto keeps {self.choice}: {said}; {trials} plans tried in {self.iterations} iterations, {self.cost}"

    def _took(self, choice: Choice) -> str:
        return f"{(self.median_ns(choice) or 0) / 1e6:.3g} ms"
