"""What-ifs: how much bandwidth a policy needs, and what its knobs are worth."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from gradlane.core.fields import MAX_RATE, need, need_int
from gradlane.core.policy import Policy
from gradlane.errors import InputError
from gradlane.planning import catalog
from gradlane.planning.questions.sweep import Case, Outcome, Refusal, judge
from gradlane.planning.search.space import with_knobs
from gradlane.units import format_bytes

STEPS_A_DECADE = 6
FINE = 1.01  # the answer is within a percent


class Needed(NamedTuple):
    """The least rate in bytes per second, or None if even the highest rate tried is not enough."""

    bytes_per_second: int | None
    reached: float
    """The efficiency at that rate, or at the highest tried."""
    is_lowest_tried: bool = False
    """Whether no lower rate was tried: a lower one may reach the target too."""


def needed_rates(
    policy: Policy,
    at: Callable[[int], Case],
    targets: Sequence[float],
    low: int = 10**6,
    high: int = 5 * 10**10,
    refuse: Callable[[Refusal], None] | None = None,
) -> list[Needed]:
    """The least link rate at which a policy reaches each target (Mercury Fig. 12).

    Non-preemptive schedules have anomalies: a faster link may give a slower iteration. So the whole
    grid from `high` down to the answer, `STEPS_A_DECADE` rates to a factor of ten, must reach the
    target. Bisection finds the answer between the last rate that reaches it and the first that does
    not.

    Args:
        policy: what to simulate.
        at: from a rate in bytes per second to the case with links of that rate.
        targets: efficiencies, as fractions of linear scaling.
        low, high: the range of rates, in bytes per second.
        refuse: called where the policy cannot plan at a rate that is tried. None: raise.

    Returns:
        One result for each target; none after a refusal.
    """
    for target in targets:
        need(0 < target < 1, "target", target, "a part of linear scaling between 0 and 1")
    need_int("low", low, 1, MAX_RATE)
    need_int("high", high, low, MAX_RATE)

    @functools.cache
    def efficiency(rate: int) -> float:
        case = at(rate)
        try:
            return judge(policy, case, bound_ns=0).efficiency
        except InputError as error:
            raise _Refused(Refusal(case, catalog.spelled(policy), error)) from error

    try:
        return [_needed(efficiency, target, low, high) for target in targets]
    except _Refused as refused:
        if refuse is None:
            raise refused.refusal.error from None
        refuse(refused.refusal)
        return []


class _Refused(Exception):
    """Ends the search of a rate.

    Args:
        refusal: of the policy, at one of the rates.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal)
        self.refusal = refusal


def _needed(efficiency: Callable[[int], float], target: float, low: int, high: int) -> Needed:
    enough = short = 0
    for rate in _down(high, low):
        if efficiency(rate) < target:
            short = rate
            break
        enough = rate
    if not enough:
        return Needed(None, efficiency(high))
    while short and enough > short * FINE:
        middle = round((enough * short) ** 0.5)
        if efficiency(middle) >= target:
            enough = middle
        else:
            short = middle
    return Needed(enough, efficiency(enough), is_lowest_tried=not short)


def _down(high: int, low: int) -> Iterator[int]:
    step = 0
    while (rate := round(high / 10 ** (step / STEPS_A_DECADE))) >= low:
        yield rate
        step += 1


def knob_grid(
    policy: Policy,
    case: Case,
    partitions: Sequence[int],
    credits: Sequence[int],
    advance: Callable[[int], None] = lambda done: None,
    refuse: Callable[[Refusal], None] | None = None,
) -> list[tuple[int, int, Outcome]]:
    """Judge a policy for each partition size and credit (ByteScheduler Fig. 4).

    A credit below the partition is left out: it has the effect of a credit of one partition.

    Args:
        policy: one with the knobs `partition_bytes` and `credit_bytes`.
        case: what to simulate.
        partitions, credits: in bytes.
        advance: called with 1 after each outcome.
        refuse: called where the policy cannot plan with a partition; the others go on. None: raise.

    Returns:
        Triples of partition, credit and outcome.
    """
    bound_ns = case.bound_ns
    grid = []
    for partition, credit in product(partitions, credits):
        if credit >= partition:
            knobs = f"a partition of {format_bytes(partition)} and a credit of {format_bytes(credit)}"
            of_sizes = with_knobs(policy, {"partition_bytes": partition, "credit_bytes": credit})
            try:
                grid.append((partition, credit, judge(of_sizes, case, bound_ns)))
            except InputError as error:
                if refuse is None:
                    raise
                refuse(Refusal(case, f"{policy.name} with {knobs}", error))
            advance(1)
    return grid
