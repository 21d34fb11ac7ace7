"""Choosing: a few policies tried while a job trains (`trying`), against the one that is in force."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradlane.core.search_log import Choice, PolicyTrial
from gradlane.planning.trial_runner import TrialRunner, TryOptions

_LOSS = 3.0  # iterations' time that a look may lose before it tries nothing further
# measured a trial, and once more of what looks best: of the first look, and of later ones, which hold up a job that runs well.
# Many trials of two find more than few of three: what is missed is mostly what was not tried
_FIRST, _AGAIN = (2, 3), (2, 2)
PART_OF_TIME = 0.03
"""Of a job's time at most so much is lost to looking again, ..."""
ALLOWANCE_NS = 5 * 10**9
"""... and this much at once, so that the first few changes need not wait for it."""


class _Listed:
    """Choices in a given order."""

    def __init__(self, choices: Iterable[Choice]) -> None:
        self._left = list(choices)

    def ask(self) -> Choice | None:
        return self._left.pop(0) if self._left else None

    def tell(self, iteration_ns: int) -> None:
        """The order stays."""


class Choosing(TrialRunner[Choice]):
    """One look: what is in force, then others, the best of those once more, and what was in force once more.

    safe: what the winner must not be slower than; it is among those tried. again: this is not the first look.
    """

    def __init__(self, in_force: Choice, safe: Choice, others: Sequence[Choice], again: bool) -> None:
        listed = [choice for choice in dict.fromkeys((safe, *others)) if choice != in_force]
        once, finally_ = _AGAIN if again else _FIRST
        options = TryOptions(1 + max(1, len(listed)), once, loss=_LOSS, final_iterations=finally_)
        super().__init__(in_force, _Listed(listed), options, in_force=True)
        self._safe = safe

    @property
    def tried(self) -> tuple[PolicyTrial, ...]:
        return tuple(PolicyTrial(attempt.choice, attempt.times_ns, attempt.cut) for attempt in self.attempts)

    def verdict(self, predicted_ns: int | None) -> str:
        """One line on what is kept and why. predicted_ns: for what is kept."""
        kept_ns, safe_ns = self.median_ns(self.choice), self.median_ns(self._safe)
        assert kept_ns is not None
        said = f"{kept_ns / 1e6:.3g} ms an iteration"
        if predicted_ns is not None:
            said += f" (predicted {predicted_ns / 1e6:.3g})"
        if self.choice == self._safe:
            said += ", nothing tried was faster"
        elif safe_ns is not None:
            said += f", {safe_ns / kept_ns:.2f} times as fast as {self._safe} at {safe_ns / 1e6:.3g}"
        trials = len({str(attempt.choice) for attempt in self.attempts})
        return (
            f"auto keeps {self.choice}: {said}; {trials} plans tried in {self.iterations} iterations, "
            f"{self.lost:.1f} iterations' time lost"
        )
