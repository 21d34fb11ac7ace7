"""The drawings of the documentation: that they are those of the code as it is, and what a timeline's drawing shows."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from gradlane.core.network import Network
from gradlane.policies import P3, Wfbp
from website import pictures
from website.svg import messages_of, timelines


@pytest.mark.parametrize("name", pictures.CONCEPTS)
def test_a_drawing_in_the_repository_is_what_the_code_does(name: str) -> None:
    drawn = (pictures.FOLDER / f"{name}.svg").read_text()
    assert drawn == pictures.concept(name), "run: python -m website.pictures"


def test_each_message_of_the_iterations_shown_has_a_bar_and_nothing_lies_outside() -> None:
    row = pictures.run("p3", P3(slice_bytes=2_000_000))
    whole = [message for message in messages_of(row) if message.end < row.steps[-1] - row.steps[0]]
    assert {message.number for message in whole} == set(range(len(row.plan.messages)))
    root = ElementTree.fromstring(timelines("two steps", [row]))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    boxes = [box.attrib for box in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(boxes) > 2 * len(row.plan.messages)
    for box in boxes:
        assert float(box.get("x", 0)) >= 0
        assert float(box.get("x", 0)) + float(box["width"]) <= width
        assert float(box.get("y", 0)) + float(box["height"]) <= height


def test_names_are_text_and_no_markup() -> None:
    row = pictures.run('a < b & "c"', Wfbp(), Network.line(2, 0, 10**9))
    root = ElementTree.fromstring(timelines("<title>", [row]))
    assert 'a < b & "c"' in {element.text for element in root.iter()}
