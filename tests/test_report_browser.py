"""Reports in a real browser: they open without a network and without an error, and can be moved in and asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gradlane import policies, zoo
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.planning.plans import make_plan
from gradlane.report.page import Facts, facts, render_page
from gradlane.report.page.drawing import draw, plan_facts, typical_iterations
from gradlane.sim import simulate
from tests.browser import CHROMIUM, Page, page
from tests.commands import invoke

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

IS_READY = "document.body !== null && document.body.dataset.ready === 'yes'"
NEXT_FRAME = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
CANVAS = "(() => { const box = document.querySelector('#timeline canvas').getBoundingClientRect(); return [box.x, box.y]; })()"
ARMS = ("ddp", "wfbp", "bytescheduler", "blocks")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of simulated iterations: what it shows is as in a run's."""
    profile, network = zoo.profile("resnet50"), Network.line(4, 50_000, 10**9)
    arms = []
    for name in ARMS:
        plan = make_plan(policies.get(name), profile, Place(network))
        timeline = simulate(plan, profile, network)
        drawn = draw(plan, [timeline, msgspec.structs.replace(timeline, rank=1)], typical_iterations([timeline]))
        drawn = msgspec.structs.replace(drawn, simulated=drawn.ranks[0])
        arms.append(
            facts.ArmFacts(
                name, "", [[1.0, 2.0]], 1.5, 1.0, 2.0, (1.2, 1.1, 1.3), plan=plan_facts(plan, profile), timeline=drawn
            )
        )
    trial = facts.TrialFacts("title", "The answer.", "1.20x", "bound", [("alone", 1.0)], [], arms)
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_bytes(render_page(Facts("a run", [("command", "gradlane compare")], [trial])))
    return file


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with page() as opened:
        yield opened


@pytest.fixture
def opened(browser: Page) -> Page:
    browser.said.clear()
    browser.asked_for.clear()
    return browser


def is_painted(opened: Page) -> bool:
    """Whether the canvas of the timelines has more than two colours."""
    script = """(() => {
        const canvas = document.querySelector('#timeline canvas');
        const pixels = new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer);
        return new Set(pixels).size;
    })()"""
    return int(opened.evaluate(script)) > 2


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_a_report_opens_without_an_error_or_a_request_and_fits_its_width(
    opened: Page, report: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    opened.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    opened.size(width, 900)
    opened.open(report, IS_READY)
    headings = opened.evaluate("[...document.querySelectorAll('h2')].map((each) => each.textContent)")
    assert headings == ["Timelines", "Steps", "Plans", "To run it again"]  # no profile, so not where the time goes
    assert is_painted(opened)
    assert opened.evaluate("document.querySelectorAll('svg.plan rect').length") > 100
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    opened.screenshot(tmp_path / f"{width}-{scheme}.png")
    assert opened.said == []
    assert set(opened.asked_for) == {report.resolve().as_uri()}


@pytest.mark.parametrize(
    ("command", "headings"),
    [
        (["plan", "alexnet", "--rate", "1gbit"], ["Timelines", "Where a step's time goes", "Plans"]),
        (
            ["simulate", "alexnet", "--rate", "1gbit,10gbit", "--policy", "ddp", "--policy", "blocks"],
            ["alexnet", "All cases"],
        ),
        (["whatif", "workers", "alexnet", "--workers", "2,4", "--policy", "ddp"], ["alexnet, ring all-reduce", "All answers"]),
        (["whatif", "faster", "alexnet", "--workers", "2x2", "--policy", "ddp"], ["All answers"]),
    ],
)
@pytest.mark.parametrize("width", [1280, 390])
def test_what_was_simulated_has_the_sections_that_there_is_something_for(
    opened: Page, tmp_path: Path, command: list[str], headings: list[str], width: int
) -> None:
    file = tmp_path / "report.html"
    invoke(*command, "--report", file)
    opened.size(width, 900)
    opened.open(file, IS_READY)
    found = opened.evaluate("[...document.querySelectorAll('h2')].map((each) => each.textContent)")
    assert found == [*headings, "To run it again"]
    assert opened.evaluate("document.querySelectorAll('tbody tr').length") > 1
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    assert (opened.said, len(opened.asked_for)) == ([], 1)


def test_wheel_drag_and_keys_move_the_timelines_and_the_pointer_asks_what_a_bar_is(opened: Page, report: Path) -> None:
    view = "(() => { const view = document.getElementById('timeline').view; return [view.begin, view.end]; })()"
    opened.size(1280, 900)
    opened.open(report, IS_READY)
    opened.evaluate("document.getElementById('timeline').scrollIntoView()")
    left, top = opened.evaluate(CANVAS)
    begin, end = opened.evaluate(view)
    opened.mouse("mouseWheel", left + 500, top + 60, deltaX=0, deltaY=-300, modifiers=2)
    opened.evaluate(NEXT_FRAME)
    nearer, further = opened.evaluate(view)
    assert begin < nearer < further < end
    opened.mouse("mousePressed", left + 500, top + 60, button="left", buttons=1, clickCount=1)
    opened.mouse("mouseMoved", left + 300, top + 60, button="left", buttons=1)
    opened.mouse("mouseReleased", left + 300, top + 60, button="left", clickCount=1)
    assert opened.evaluate(view)[0] > nearer
    opened.evaluate("document.querySelector('#timeline canvas').focus()")
    for kind in ("keyDown", "keyUp"):
        opened.call("Input.dispatchKeyEvent", type=kind, key="Home", code="Home", windowsVirtualKeyCode=36)
    assert opened.evaluate(view) == [begin, end]
    bar = opened.evaluate("""(() => {
        const view = document.getElementById('timeline').view;
        const row = view.rows.find((each) => each.kind === 'messages');
        const { track, start, end } = row.bars[0];
        return [view.labels + ((start + end) / 2 - view.begin) / view.perPixel, row.top + (track + 0.5) * row.each];
    })()""")
    opened.mouse("mouseMoved", left + bar[0], top + bar[1])
    said = opened.evaluate("document.querySelector('.tip').textContent")
    assert "message 0, priority" in said
    assert "waited" in said
    assert opened.said == []
