"""Draws what a run measured: `python -m website.timeline out docs/pictures/ddp-beside-auto.svg`.

The first argument is a folder that `gradlane compare --out` left, the second the SVG to write, any more
are the names of arms; without them DDP and auto are drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gradlane.compare.arms import BASELINE, file_of
from gradlane.compare.records import Comparison
from gradlane.core import files
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.records.search_log import AUTO
from gradlane.core.timeline import Timeline
from gradlane.report.page.drawing import draw, typical_iterations, urgencies
from gradlane.report.page.run_folder import COMPARISON
from website.svg import Row, timelines

SHOWN = 2  # iterations
TITLES = {BASELINE: "PyTorch's DDP", AUTO: "gradlane"}


def picture(folder: Path, arms: Sequence[str]) -> str:
    """Typical iterations of rank 0 under each of some arms of a run, as SVG."""
    comparison = Comparison.from_json((folder / COMPARISON).read_bytes())
    results = {result.policy: result for result in comparison.results}
    profile = files.read(folder / "profile-rank0.json", Profile)
    rows = []
    for arm in arms:
        plan = files.read(folder / file_of("plan", arm, 0), Plan)
        timeline = files.read(folder / file_of("timeline", arm, 0), Timeline)
        step_ns = results[arm].median_ns
        # one more than is shown: what an iteration leaves for the next is drawn too
        drawn = draw(plan, [timeline], typical_iterations([timeline], step_ns, SHOWN + 1))
        said = f"{step_ns / 1e6:.0f} ms a step"
        speedup = results[arm].speedup
        if arm != BASELINE and speedup is not None:
            said += f", {speedup.ratio:.2f} times as fast ({speedup.low:.2f} to {speedup.high:.2f})"
        rows.append(Row(TITLES.get(arm, arm), said, plan, drawn.ranks[0], drawn.iterations[2:], urgencies(plan, profile)))
    return timelines(f"{comparison.model} on {comparison.hosts} hosts: two steps under {' and under '.join(arms)}", rows)


def main() -> None:
    folder, target, *arms = sys.argv[1:]
    Path(target).write_text(picture(Path(folder), arms or [BASELINE, AUTO]))


if __name__ == "__main__":
    main()
