"""Reports in a real browser: they open without a network and without an error, and can be moved in and asked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from gradlane import policies, zoo
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
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
SPEEDUPS = {"wfbp": 1.1, "ddp": 1.0, "bytescheduler": 0.9, "blocks": 1.4}
VIEW = "document.getElementById('timeline').view"
MIDDLE_OF = "((from, to) => VIEW.labels + ((from + to) / 2 - VIEW.begin) / VIEW.perPixel)".replace("VIEW", VIEW)
SAID = "document.querySelector('#timeline [role=status]').textContent"


PROFILE, NETWORK = zoo.profile("resnet50"), Network.line(4, 50_000, 10**9)


def plan_of(name: str) -> Plan:
    return make_plan(policies.get(name), PROFILE, Place(NETWORK))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of simulated iterations: what it shows is as in a run's."""
    arms = []
    for name, ratio in SPEEDUPS.items():
        plan = plan_of(name)
        timeline = simulate(plan, PROFILE, NETWORK)
        drawn = draw(plan, [timeline, msgspec.structs.replace(timeline, rank=1)], typical_iterations([timeline]))
        drawn = msgspec.structs.replace(drawn, simulated=drawn.ranks[0])
        arms.append(
            facts.ArmFacts(
                name,
                "",
                [[1.0, 2.0]],
                1.5,
                1.0,
                2.0,
                (ratio, 0.9 * ratio, 1.1 * ratio),
                plan=plan_facts(plan, PROFILE),
                timeline=drawn,
            )
        )
    choices = facts.TableFacts(
        "Choices", ["tried", "ms"], [["bytescheduler partition_bytes=1.2 MiB credit_bytes=1.2 MiB", "456"]]
    )
    trial = facts.TrialFacts(
        "title", "The answer.", "1.20x", "bound", [("alone", 1.0)], [], arms, "ddp", "blocks", 2.0, tables=[choices]
    )
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
    # without a profile, so without where the time goes
    assert headings == ["Timelines", "All policies", "Choices", "Steps", "Plans", "To run it again"]
    assert is_painted(opened)
    assert opened.evaluate("document.querySelectorAll('svg.plan rect').length") > 100
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    opened.screenshot(tmp_path / f"{width}-{scheme}.png")
    assert opened.said == []
    assert set(opened.asked_for) == {report.resolve().as_uri()}


@pytest.mark.parametrize(
    ("command", "headings"),
    [
        (["plan", "alexnet", "--rate", "1gbit"], ["Timelines", "All policies", "Where a step's time goes", "Plans"]),
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


def press(opened: Page, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        opened.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)


def drag(opened: Page, start: tuple[float, float], end: tuple[float, float], modifiers: int = 0) -> None:
    opened.mouse("mousePressed", *start, button="left", buttons=1, clickCount=1, modifiers=modifiers)
    opened.mouse("mouseMoved", *end, button="left", buttons=1, modifiers=modifiers)
    opened.mouse("mouseReleased", *end, button="left", clickCount=1, modifiers=modifiers)


def look_at(opened: Page, report: Path) -> tuple[float, float]:
    """Open the report, and scroll to its timelines: where their canvas is."""
    opened.size(1280, 900)
    opened.open(report, IS_READY)
    opened.evaluate("document.getElementById('timeline').scrollIntoView()")
    left, top = opened.evaluate(CANVAS)
    return left, top


def span_of(opened: Page) -> tuple[float, float]:
    begin, end = opened.evaluate(f"[{VIEW}.begin, {VIEW}.end]")
    return begin, end


def test_a_report_opens_with_bars_and_ddps_timeline_above_the_recommended_one(opened: Page, report: Path) -> None:
    opened.size(1280, 900)
    opened.open(report, IS_READY)
    bars = opened.evaluate(
        "[...document.querySelectorAll('.speedup')].map((each) => each.innerText.split('\\n').filter(Boolean))"
    )
    assert bars == [["ddp", "1.00x"], ["blocks", "1.40x"], ["wfbp", "1.10x"], ["bytescheduler", "0.90x"]]
    # the line is where a bar of twice DDP's length would end, and the spread reaches from 0.9 to 1.1 of the bar
    wide, fill, limit, low, high = opened.evaluate("""(() => {
        const row = document.querySelector('.speedup.main'), at = (of) => row.querySelector(of).getBoundingClientRect();
        const left = at('.track').left, spread = at('.spread');
        return [at('.track').width, at('.fill').width, at('.limit').left - left, spread.left - left, spread.right - left];
    })()""")
    assert 0 < limit < wide
    assert [fill, low, high] == pytest.approx([limit * each / 2.0 for each in (1.4, 1.26, 1.54)], abs=1)
    caption = opened.evaluate("document.querySelector('.speedups figcaption').textContent")
    assert caption.startswith("Measured: times as fast as DDP")
    assert "2.00x is what no schedule can exceed" in caption
    labels = "[...document.querySelectorAll('#timeline label')].filter((label) => label.control.checked)"
    ticked = opened.evaluate(f"{labels}.map((label) => label.innerText.trim())")
    assert ticked == ["ddp", "blocks"]
    headings = opened.evaluate(f"{VIEW}.rows.filter((row) => row.kind === 'heading').map((row) => [row.text, row.top])")
    assert [text for text, _ in headings] == ["ddp, measured", "blocks, measured"]
    # the whole of DDP's timeline and where the other one computes lie on the first screen
    assert opened.evaluate(CANVAS)[1] + headings[1][1] + 60 < 900
    assert opened.evaluate("document.querySelector('#timeline').compareDocumentPosition(document.querySelector('table'))") == 4
    assert opened.evaluate("document.querySelector('select[aria-label=policy]').value") == "blocks"


def test_wheel_drag_and_keys_move_the_timelines_and_the_pointer_asks_what_a_bar_is(opened: Page, report: Path) -> None:
    left, top = look_at(opened, report)
    begin, end = span_of(opened)
    opened.mouse("mouseWheel", left + 500, top + 60, deltaX=0, deltaY=-300, modifiers=2)
    opened.evaluate(NEXT_FRAME)
    nearer, further = span_of(opened)
    assert begin < nearer < further < end
    drag(opened, (left + 500, top + 60), (left + 300, top + 60), modifiers=8)
    assert span_of(opened)[0] > nearer
    opened.evaluate("document.querySelector('#timeline canvas').focus()")
    press(opened, "Home")
    assert span_of(opened) == (begin, end)
    bar = opened.evaluate(f"""(() => {{
        const row = {VIEW}.rows.find((each) => each.kind === 'messages'), {{ track, start, end }} = row.bars[0];
        return [{MIDDLE_OF}(start, end), row.top + (track + 0.5) * row.each];
    }})()""")
    opened.mouse("mouseMoved", left + bar[0], top + bar[1])
    said = opened.evaluate("document.querySelector('.tip').textContent")
    assert "message 0, priority" in said
    assert "waited" in said
    assert opened.said == []


def test_w_and_s_zoom_where_the_pointer_is_and_a_and_d_move(opened: Page, report: Path) -> None:
    left, top = look_at(opened, report)
    opened.mouse("mouseMoved", left + 700, top + 60)
    at = f"{VIEW}.timeAt(700)"
    begin, end = span_of(opened)
    pointed = opened.evaluate(at)
    press(opened, "w")
    press(opened, "w")
    nearer, further = span_of(opened)
    assert further - nearer == pytest.approx(0.49 * (end - begin))
    assert opened.evaluate(at) == pytest.approx(pointed)
    press(opened, "d")
    moved, _ = span_of(opened)
    assert moved == pytest.approx(nearer + (further - nearer) / 10)
    # where the pointer is now, which is another time than when it moved last
    pointed = opened.evaluate(at)
    press(opened, "s")
    assert opened.evaluate(at) == pytest.approx(pointed)
    begin, end = span_of(opened)
    assert end - begin == pytest.approx(1.4 * (further - nearer))
    press(opened, "a")
    assert span_of(opened)[0] == pytest.approx(begin - (end - begin) / 10)
    # letters that are typed into a field are a field's
    opened.evaluate("document.querySelector('#timeline input[type=search]').focus()")
    before = span_of(opened)
    press(opened, "w")
    assert span_of(opened) == before


def test_a_range_that_is_dragged_over_shows_what_was_computed_waited_and_carried_in_it(opened: Page, report: Path) -> None:
    left, top = look_at(opened, report)
    labels, width = opened.evaluate(f"[{VIEW}.labels, {VIEW}.canvas.clientWidth]")
    rows = "[...document.querySelectorAll('#timeline tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    drag(opened, (left + labels + 1, top + 60), (left + width - 2, top + 60))
    ddp, blocks = opened.evaluate(rows)
    assert (ddp[:2], blocks[:2]) == (["ddp", "rank 0"], ["blocks", "rank 0"])
    # over both iterations, DDP sends each gradient twice
    whole = 2 * plan_of("ddp").size_bytes
    assert ddp[4] == f"{whole / 2**20:.0f} MiB"
    drag(opened, (left + 400, top + 60), (left + 640, top + 60))
    start, end = opened.evaluate(f"{VIEW}.range")
    assert span_of(opened)[0] < start < end < span_of(opened)[1]
    row = f"{VIEW}.rows.find((row) => row.messages)"
    bars = opened.evaluate(f"(({{ bars, messages }}) => ({{ bars, messages }}))({row})")
    found = opened.evaluate(f"(({{ arm, bars, messages }}) => sumsIn(arm.plan, bars, messages, ...{VIEW}.range))({row})")

    def covered(kinds: set[str]) -> float:
        edges = sorted({start, end, *(at for bar in bars["bars"] for at in (bar["begin"], bar["begin"] + bar["length"]))})
        inside = [(low, high) for low, high in pairwise(edges) if start <= low and high <= end]
        taken = [bar for bar in bars["bars"] if bar["kind"] in kinds]
        return sum(
            high - low
            for low, high in inside
            if any(bar["begin"] <= low and high <= bar["begin"] + bar["length"] for bar in taken)
        )

    sizes = [message.size_bytes for message in plan_of("ddp").messages]
    carried = sum(
        sizes[bar["message"]] * max(0, min(bar["end"], end) - max(bar["start"], start)) / (bar["end"] - bar["start"])
        for bar in bars["messages"]
    )
    assert found["waiting"] == pytest.approx(covered({"wait"}))
    assert found["computing"] == pytest.approx(covered({"forward", "backward", "update", "wait"}) - covered({"wait"}))
    assert found["bytes"] == pytest.approx(carried, abs=1)
    assert found["computing"] > 0
    assert found["waiting"] > 0
    assert opened.evaluate(rows)[0][4] == opened.evaluate(f"bytes({found['bytes']})")
    press(opened, "Escape")
    assert opened.evaluate(rows) == []


def test_a_tensor_is_searched_by_name_and_the_messages_that_carry_it_stand_out(opened: Page, report: Path) -> None:
    look_at(opened, report)
    plan = plan_of("blocks")
    name = plan.tensors[len(plan.tensors) // 2].name
    pixels = "document.querySelector('#timeline canvas').toDataURL()"
    before = opened.evaluate(pixels)
    opened.evaluate("document.querySelector('#timeline input[type=search]').focus()")
    opened.call("Input.insertText", text=name.upper())
    opened.evaluate(NEXT_FRAME)
    tensors = {at for at, spec in enumerate(plan.tensors) if name in spec.name}
    messages = sum(bool(tensors.intersection(message.tensors)) for message in plan.messages)
    assert f"blocks: {len(tensors)} tensors found, in {messages} of {len(plan.messages)} messages" in opened.evaluate(SAID)
    assert opened.evaluate(pixels) != before


@pytest.mark.parametrize("policy", ["ddp", "blocks"])
def test_a_click_on_a_wait_marks_the_message_that_held_it(opened: Page, report: Path, policy: str) -> None:
    left, top = look_at(opened, report)
    row = f"{VIEW}.rows.find((row) => row.messages && row.arm.name === '{policy}')"
    x, y, wait = opened.evaluate(f"""(() => {{
        const row = {row}, waits = row.bars.filter((bar) => bar.kind === 'wait');
        const wait = waits.reduce((most, bar) => (bar.length > most.length ? bar : most));
        return [{MIDDLE_OF}(wait.begin, wait.begin + wait.length), row.top + row.height / 2, wait];
    }})()""")
    drag(opened, (left + x, top + y), (left + x, top + y))
    held = opened.evaluate(f"{VIEW}.marked.held")
    plan = plan_of(policy)
    assert held["end"] == pytest.approx(wait["begin"] + wait["length"], abs=2)
    assert wait["subject"] in (-1, *plan.messages[held["message"]].tensors)
    assert f"held by message {held['message']}" in opened.evaluate(SAID)
    opened.mouse("mousePressed", left + 60, top + y, button="left", buttons=1, clickCount=1)
    opened.mouse("mouseReleased", left + 60, top + y, button="left", clickCount=1)
    assert opened.evaluate(f"{VIEW}.marked") is None


def test_on_a_telephone_a_table_says_that_it_has_more_columns(opened: Page, report: Path) -> None:
    hint = (
        "getComputedStyle(document.querySelector('.hint')).visibility === 'visible' && !document.querySelector('.hint').hidden"
    )
    opened.size(390, 844)
    opened.open(report, IS_READY)
    opened.evaluate(NEXT_FRAME)
    assert opened.evaluate("document.querySelector('.scroll').scrollWidth > document.querySelector('.scroll').clientWidth")
    assert opened.evaluate(hint)
    opened.evaluate("document.querySelector('.scroll').scrollLeft = 10000")
    opened.evaluate(NEXT_FRAME)
    assert not opened.evaluate(hint)
    # beside the names of the rows, which stay in view, the last column of each table can be scrolled into view
    edges = opened.evaluate("""[...document.querySelectorAll('.scroll')].map((box) => {
        box.scrollLeft = 10000;
        const cells = box.querySelectorAll('tbody tr:first-child td'), first = cells[0].getBoundingClientRect();
        const last = cells[cells.length - 1].getBoundingClientRect();
        return [first.left, first.right, last.left, last.right];
    })""")
    assert len(edges) == 2
    assert all(0 <= left < right <= last_left < last_right <= 390 for left, right, last_left, last_right in edges)
    opened.size(1280, 900)
    opened.open(report, IS_READY)
    opened.evaluate(NEXT_FRAME)
    assert not opened.evaluate(hint)
