"""From what the simulator answered to a report: of `plan`, `simulate`, `whatif` and `advise`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.timeline import Timeline
from gradlane.report.page import facts
from gradlane.report.page.drawing import draw, parts_of, plan_facts, typical_iterations

Lines = Mapping[str, Sequence[tuple[float, float]]]


def simulated_arm(
    name: str,
    plan: Plan,
    timeline: Timeline | None,
    profile: Profile,
    iteration_ns: int,
    bound_ns: int,
    baseline_ns: int | None,
    steady: Collection[int],
) -> facts.ArmFacts:
    """One policy that was simulated.

    Args:
        name: for people.
        plan: that was simulated.
        timeline: what happened on one rank; None for a worker that sends nothing.
        profile: that was simulated.
        iteration_ns, bound_ns: a steady step, and what no schedule goes below.
        baseline_ns: a steady step under DDP; None if it was not simulated.
        steady: the iterations of the timeline that `iteration_ns` is the mean of: the first ones wait for less.
    """
    ratio = None if baseline_ns is None or not iteration_ns else baseline_ns / iteration_ns
    return facts.ArmFacts(
        name=name,
        note="",
        turns_ms=[],
        speedup=None if ratio is None else (ratio, ratio, ratio),
        hidden=None if timeline is None else timeline.hidden(),
        predicted_ms=iteration_ns / 1e6,
        bound_ms=bound_ns / 1e6,
        parts=None if timeline is None else parts_of(timeline, plan, profile, steady),
        plan=plan_facts(plan, profile),
        timeline=None if timeline is None else _drawn(plan, timeline, steady),
    )


def _drawn(plan: Plan, timeline: Timeline, steady: Collection[int]) -> facts.Timeline | None:
    iterations = typical_iterations([timeline.during(range(max(steady) + 1))])
    if not iterations:
        return None
    drawn = draw(plan, [msgspec.structs.replace(timeline, rank=0)], iterations)
    return msgspec.structs.replace(drawn, ranks=[msgspec.structs.replace(each, rank=-1) for each in drawn.ranks])


def charts(panels: Mapping[str, Lines], x: str, y: str, *, log_x: bool = False) -> list[facts.ChartFacts]:
    """The charts of `plots.draw`, for a report.

    Args:
        panels: by title, lines by name.
        x, y: of the axes.
        log_x: factors of x are as wide everywhere.
    """
    return [
        facts.ChartFacts(title, x, y, log_x, [(name, sorted(points)) for name, points in lines.items() if points])
        for title, lines in panels.items()
    ]
