"""A large report: how many bytes it has, and how many frames a second its timelines give in Chromium while they are moved.

    python -m bench.report_page [--arms 20] [--ranks 8] [--tensors 500]

Every rank of every arm has two iterations with a message for each tensor. All arms are shown at once, whole and then at a
twentieth of the time; a frame is drawn after each step to the side. What is told is the time of drawing itself, and of a frame.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

import msgspec

from gradlane import policies
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.core.timeline import Span, Timeline
from gradlane.planning.plans import make_plan
from gradlane.report.page import Facts, facts, render_page
from gradlane.report.page.drawing import draw, plan_facts, typical_iterations
from gradlane.sim import simulate
from tests.browser import CHROMIUM, page

NETWORK = Network.line(8, 20_000, 10**9)
MOVE = """new Promise((done) => {
  const view = document.getElementById('timeline').view, drawing = [], frames = [];
  let last = performance.now();
  const step = () => {
    const began = performance.now();
    view.begin += 20 * view.perPixel; view.end += 20 * view.perPixel; view.draw();
    drawing.push(performance.now() - began); frames.push(began - last); last = began;
    if (drawing.length < 60) requestAnimationFrame(step);
    else done([drawing, frames.slice(1)].map((times) => times.sort((a, b) => a - b)[times.length >> 1]));
  };
  requestAnimationFrame(step);
})"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("arms", 20), ("ranks", 8), ("tensors", 500)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("bench.report_page needs Chromium on the PATH")
    data = render_page(report(given.arms, given.ranks, given.tensors))
    print(f"{given.arms} arms, {given.ranks} ranks, {given.tensors} tensors: {len(data) / 1e6:.2f} MB", flush=True)
    with tempfile.TemporaryDirectory() as folder, page() as opened:
        file = Path(folder, "report.html")
        file.write_bytes(data)
        opened.size(1280, 900)
        opened.open(file, "document.body !== null && document.body.dataset.ready === 'yes'")
        view = "document.getElementById('timeline').view"
        opened.evaluate(f"{view}.arms.forEach((arm) => {view}.shown.add(arm)); {view}.showsAll = true; {view}.choose()")
        for what, zoom in (("whole", 1.0), ("a twentieth", 0.05)):
            opened.evaluate(f"{view}.reset(); {view}.zoom({zoom})")
            drawing, frame = opened.evaluate(MOVE)
            print(
                f"  {what}: drawing takes {drawing:.1f} ms, a frame {frame:.1f} ms, {1e3 / frame:.0f} frames a second",
                flush=True,
            )


def report(arms: int, ranks: int, tensors: int) -> Facts:
    random.seed(0)
    sizes = [4 * random.randint(250, 250_000) for _ in range(tensors)]
    profile = Profile(
        "large",
        "none",
        tuple(TensorProfile(TensorSpec(f"layer{i}.weight", sizes[i]), 200_000 * i, tensors - 1 - i) for i in range(tensors)),
        tuple(Layer(f"layer{i}", 100_000) for i in range(tensors)),
        200_000 * tensors,
    )
    plan = make_plan(policies.get("wfbp"), profile, Place(NETWORK))
    timeline = simulate(plan, profile, NETWORK)
    drawn = plan_facts(plan, profile)
    shown = []
    for place in range(arms):
        timelines = [unlike(timeline, rank) for rank in range(ranks)]
        lines = draw(plan, timelines, typical_iterations(timelines))
        shown.append(facts.ArmFacts(f"arm{place}", "", [[1.0]], 1.0, 1.0, 1.0, (1.0, 1.0, 1.0), plan=drawn, timeline=lines))
    return Facts("large", [], [facts.TrialFacts("large", "", "", "", [], [f"layer{i}" for i in range(tensors)], shown)])


def unlike(timeline: Timeline, rank: int) -> Timeline:
    """The same timeline with times as two real ones differ, so that they do not compress to one."""

    def at(time_ns: int) -> int:
        return time_ns + random.randrange(20_000)

    spans = (
        msgspec.structs.replace(span, start_ns=(start := at(span.start_ns)), end_ns=max(start, at(span.end_ns)))
        for span in timeline.spans
    )
    return Timeline(
        timeline.plan, rank, tuple(span if span.kind == "step" else Span(*msgspec.structs.astuple(span)) for span in spans)
    )


if __name__ == "__main__":
    main()
