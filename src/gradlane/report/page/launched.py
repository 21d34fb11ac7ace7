"""From what the ranks of a job left (`gradlane launch --timeline`, `--report`) to a report."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from statistics import median_low

import msgspec

from gradlane.core import files
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.timeline import Timeline
from gradlane.errors import InputError
from gradlane.planning.advice import DOUBTFUL
from gradlane.planning.questions.prediction import predict
from gradlane.report.page import facts
from gradlane.report.page.drawing import draw, draw_simulated, parts_of, plan_facts, quantile, typical_iterations
from gradlane.units import format_ns

MOST_RANKS = 16  # whose timelines are drawn


def left_something(folder: Path) -> bool:
    """Whether a rank of a job left its plan and timeline in `folder`."""
    return bool(_timelines(folder))


def files_of_job(folder: Path) -> list[Path]:
    """What the ranks of a job left in `folder`, and in its folders of further sessions: by their names."""
    folders = [folder, *(path for path in folder.glob("session-*") if re.fullmatch(r"session-[0-9]{1,7}", path.name))]
    names = r"(timeline-rank[0-9]{1,7}|plan-rank[0-9]{1,7}|profile|network)\.json"
    return [path for each in folders for path in each.glob("*.json") if re.fullmatch(names, path.name)]


def _timelines(folder: Path) -> list[Path]:
    """Each rank's file."""
    return [path for path in folder.glob("timeline-rank*.json") if re.fullmatch(r"timeline-rank[0-9]{1,7}\.json", path.name)]


def with_plan(path: Path, timelines: list[Timeline]) -> tuple[Plan, list[Timeline]]:
    """The plan in a file, and those of the timelines beside it that are of this plan.

    Raises:
        OSError: there is no file.
        FormatError: it has no plan.
        InputError: no timeline is of the plan.
    """
    plan = files.read(path, Plan)
    of_plan = [timeline for timeline in timelines if timeline.plan == plan.fingerprint]
    if not of_plan:
        raise InputError(f"{path}: got plan {plan.fingerprint}, expected the one that a timeline beside it is of")
    return plan, of_plan


def of_launch(folder: Path) -> facts.TrialFacts:
    """The steps of one session that were kept, on the ranks whose files are in `folder`.

    Args:
        folder: has `timeline-rankN.json` and `plan-rankN.json`; with rank 0's `profile.json` and
            `network.json` the plan is simulated, too.

    Raises:
        OSError: a plan is not there.
        FormatError: a file in it is not what it should be.
        InputError: no timeline is of the plan, or the profile is of another model.
    """
    paths = sorted(_timelines(folder), key=lambda path: int(path.stem.removeprefix("timeline-rank")))
    timelines = [files.read(path, Timeline) for path in paths[:MOST_RANKS]]
    plan, timelines = with_plan(folder / f"plan-rank{timelines[0].rank}.json", timelines)
    first = timelines[0]
    steps = [took / 1e6 for took in first.iteration_ns()]
    profile, network_path = _profile_for(plan, folder / "profile.json"), folder / "network.json"
    outcome = None
    if profile is not None and network_path.exists():
        outcome = predict(plan, profile, files.read_where(network_path))
    typical_ns = median_low(first.iteration_ns()) if steps else 0
    iterations = typical_iterations(timelines, typical_ns)
    drawn = draw(plan, timelines, iterations) if iterations else None
    if drawn is not None and outcome is not None:
        drawn = msgspec.structs.replace(drawn, simulated=draw_simulated(plan, outcome.timeline(), len(iterations)))
    parts = None if profile is None else parts_of(first, plan, profile)
    whole = f"the last {len(steps)} whole steps" if steps else "no whole step"
    answer = f"No whole step was recorded under {plan.policy}, the last plan; let the script train longer."
    if steps:
        waits = "" if parts is None else f"; usual steps spend {parts.waits:.0%} of their time waiting"
        answer = f"A step takes {format_ns(round(typical_ns))} under {plan.policy} (the median, on rank {first.rank}){waits}."
    arm = facts.ArmFacts(
        name=plan.policy,
        note="",
        turns_ms=[steps] if steps else [],
        median_ms=median_low(steps) if steps else None,
        low_ms=quantile(steps, 0.1) if steps else None,
        high_ms=quantile(steps, 0.9) if steps else None,
        hidden=first.hidden(),
        predicted_ms=None if outcome is None else outcome.iteration_ns / 1e6,
        bound_ms=None if outcome is None else outcome.bound_ns / 1e6,
        parts=parts,
        plan=plan_facts(plan, profile),
        timeline=drawn,
    )
    shown = ", ".join(str(timeline.rank) for timeline in timelines)
    return facts.TrialFacts(
        title=f"{plan.model}, {whole} under the last plan, of ranks {shown}",
        answer=answer,
        number=format_ns(round(typical_ns)) if steps else "-",
        bound="" if outcome is None else "simulated from the profile and the network that the job measured in its first steps",
        lines=[] if profile is None else [("computing alone, as measured in the first steps", profile.compute_ns / 1e6)],
        layers=[] if profile is None else [layer.name for layer in profile.layers],
        arms=[arm],
        remarks=[] if outcome is None or not steps else _remarks(outcome.iteration_ns, typical_ns, outcome.bound_ns),
    )


def _profile_for(plan: Plan, path: Path) -> Profile | None:
    """The profile in a file, in the order of the plan's tensors; None if there is no file."""
    if not path.exists():
        return None
    profile = files.read(path, Profile)
    try:
        return profile.in_order_of(plan.tensors)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _remarks(simulated_ns: int, typical_ns: float, bound_ns: int) -> list[str]:
    """What to know where the simulator is far off what was measured, or a step is shorter than it holds possible."""
    if typical_ns < bound_ns:
        return [
            f"doubt the bound: a step takes {format_ns(round(typical_ns))}, less than any schedule's {format_ns(bound_ns)} by "
            "the job's measurements; the network was faster then, or other steps were measured"
        ]
    off = simulated_ns / typical_ns - 1
    if abs(off) <= DOUBTFUL:
        return []
    return [
        f"take what is simulated as rough: a step is {format_ns(simulated_ns)} simulated and {format_ns(round(typical_ns))} "
        f"measured, {abs(off):.0%} {'more' if off > 0 else 'less'}"
    ]


def sessions_in(folder: Path) -> list[Path]:
    """The folders of all sessions of a script: `folder`, and those of further ones in it."""
    further = (folder / f"session-{number}" for number in itertools.count(2))
    return [folder, *itertools.takewhile(left_something, further)]
