"""Reports that commands write: what is in all of them, and where they go."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from gradlane.cli.inputs.computing import Computing
from gradlane.cli.inputs.types import OUT_FILE
from gradlane.core import files
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.planning.questions import Case, Outcome, Refusal
from gradlane.report.page import facts, render_page
from gradlane.report.page.simulated import simulated_arm
from gradlane.units import format_ns

option = click.option("--report", type=OUT_FILE, help="Write a report: one HTML file, to be opened in a browser.")
BASELINE = "ddp"
CANNOT_PLAN = "cannot plan"


def write(path: Path, title: str, trials: Sequence[facts.TrialFacts]) -> None:
    """Write a report, with what is needed to run the command again."""
    about = [("command", command_line()), ("machine", machine())]
    page = render_page(facts.Facts(title, about, list(trials)))
    with files.writing(path):
        files.write_bytes(path, page)


def command_line() -> str:
    """This process's, as it may be typed again, but for "?" where a path is not UTF-8."""
    return shlex.join(["gradlane", *sys.argv[1:]]).encode(errors="replace").decode()


def machine() -> str:
    """This machine, and the versions of what ran."""
    try:
        torch = f", torch {version('torch')}"
    except PackageNotFoundError:
        torch = ""
    versions = f"Python {platform.python_version()}{torch}, gradlane {version('gradlane')}"
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, {versions}"


def saved_part(outcome: Outcome, baseline: Outcome) -> float:
    """The part of the baseline's iteration that another policy saves; negative if it takes longer."""
    return 1 - outcome.iteration_ns / baseline.iteration_ns if baseline.iteration_ns else 0.0


def by_devices(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """The outcomes of hosts with as many devices each, by what tells them from the others in the name of a chart's line.

    One number of workers may be of several such places, as 1x8 and 8.
    """
    found: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(int(outcome.case.labels["devices"]), []).append(outcome)
    return {"" if len(found) == 1 else f", {devices} a host": of_hosts for devices, of_hosts in found.items()}


def alone_text(profile: Profile, every: str = "") -> str:
    """How long an iteration takes without communication, and what of it is uncovered time, for people.

    Args:
        profile: of the iteration.
        every: follows the time, as in " a step".
    """
    uncovered = f", of which {format_ns(profile.uncovered_ns)} is uncovered time" if profile.uncovered_ns else ""
    return f"{format_ns(profile.compute_ns)}{every}{uncovered}"


def refusal_lines(refusals: Sequence[Refusal], cases: int = 1, name: Callable[[Case], str] = str) -> list[str]:
    """Why policies cannot plan, each reason once.

    Args:
        refusals: one for each policy and case.
        cases: how many there were; 0: a search tried some of many, and the case that it ended with is always named.
        name: of a case, for people; said of those for which a reason holds, where these are not all.
    """
    found: dict[tuple[str, str], list[Case]] = {}
    for refusal in refusals:
        found.setdefault((refusal.policy, str(refusal.error)), []).append(refusal.case)
    lines = []
    for (policy, reason), refused in found.items():
        where = "" if len(refused) == cases else f" for {', '.join(map(name, refused))}"
        lines.append(f"{policy} cannot plan{where}: {reason}")
    return lines


def baseline_line(outcomes: Iterable[Outcome], torchs_ns: int | None = None) -> list[str]:
    """What `ddp` means where servers carry messages; empty if no outcome is of it there.

    Args:
        outcomes: that are shown.
        torchs_ns: what a step of torch's DDP takes between the same hosts; None if it was not asked.
    """
    if not any(outcome.policy == BASELINE and not isinstance(outcome.case.where, Network) for outcome in outcomes):
        return []
    takes = "" if torchs_ns is None else f": {format_ns(torchs_ns)} a step between these hosts"
    return [
        f"{BASELINE} here sends DDP's buckets to the servers, first in, first out. torch's own DDP all-reduces them{takes}."
    ]


def show_lines(shown: Console, lines: Iterable[str]) -> None:
    """Print sentences under a table, each on a line of its own."""
    for line in lines:
        shown.print(Text(line), soft_wrap=True)


def show_misfits(shown: Console, models: Sequence[str], computing: Computing) -> None:
    """Print a line for each model that does not fit its device."""
    for model in models:
        replica = computing.replica(model)
        if replica is not None and replica.fits is False:
            shown.print(Text(f"{model}: {replica.remedy()} ({replica.describe()})"), soft_wrap=True)


def of_case(
    title: str, outcomes: Sequence[Outcome], remarks: Sequence[str], answer: str = "", recommended: Outcome | None = None
) -> facts.TrialFacts:
    """Every policy on one case, simulated.

    Args:
        title: the model and the network.
        outcomes: one or more, on one case.
        remarks: what to know beside, as why other policies are not there.
        answer: in one sentence; "" to say which is the fastest.
        recommended: the outcome that `answer` is about; None for the fastest.
    """
    best = recommended or min(outcomes, key=lambda outcome: outcome.iteration_ns)
    baseline = next((outcome for outcome in outcomes if outcome.policy == BASELINE), None)
    profile = best.case.profile
    baseline_ns = None if baseline is None else baseline.iteration_ns
    ratio = None if baseline is None or not best.iteration_ns else baseline.iteration_ns / best.iteration_ns
    return facts.TrialFacts(
        title=title,
        answer=answer or f"{best.policy} is the fastest: {format_ns(best.iteration_ns)} a step, simulated.",
        number="-" if ratio is None else f"{ratio:.2f}x",
        bound=f"no schedule takes less than {format_ns(best.bound_ns)}; computing alone takes {alone_text(best.case.of_one)}",
        lines=[],
        layers=[layer.name for layer in profile.layers],
        arms=[
            simulated_arm(
                one.policy, one.plan, None if one.case.is_alone else one.timeline(), _for(one.plan, profile),
                one.iteration_ns, one.bound_ns, baseline_ns, one.steady,
            )
            for one in outcomes
        ],
        baseline=BASELINE,
        recommended=best.policy,
        limit=None if baseline_ns is None or not best.bound_ns else baseline_ns / best.bound_ns,
        remarks=list(remarks),
    )  # fmt: skip


def of_lines(
    title: str, answer: str, charts: list[facts.ChartFacts], tables: list[facts.TableFacts], remarks: Sequence[str]
) -> facts.TrialFacts:
    """Charts and tables without a timeline."""
    return facts.TrialFacts(title, answer, "", "", [], [], [], charts=charts, tables=tables, remarks=list(remarks))


def _for(plan: Plan, profile: Profile) -> Profile:
    return profile if plan.tensors == profile.specs else profile.in_order_of(plan.tensors)
