"""On a shaped link an urgent tensor overtakes a large one that is under way; in order of arrival it waits it out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gradlane import lab
from gradlane.transport import NodeOptions
from tests.commands import gradlane

SCRIPT = Path(__file__).with_name("preemption.py")
LARGE, SMALL = 64 << 20, 64 << 10


@pytest.fixture(scope="module", autouse=True)
def _lab_is_supported() -> None:
    reason = lab.supported()
    if reason is not None:
        pytest.skip(reason)


def on_a_shaped_link(rate: str, order: str, large: int = LARGE, small: int = SMALL) -> dict[str, float]:
    defaults = NodeOptions(world=1, servers=1, rank=0, server=0)
    sizes = [str(number) for number in (large, small, defaults.unsent_bytes, defaults.send_buffer_bytes)]
    done = gradlane("lab", "--quiet", "--hosts", 2, "--link", rate, "--", sys.executable, SCRIPT, order, *sizes, timeout=60)
    return json.loads(done.stdout.splitlines()[-1].removeprefix("[1] "))


@pytest.mark.timing
def test_an_urgent_tensor_overtakes_64_megabytes_that_are_under_way() -> None:
    by_priority = on_a_shaped_link("200mbit", "priority")
    in_order = on_a_shaped_link("200mbit", "fifo")
    print(f"\nby priority: {by_priority}\nin order of arrival: {in_order}")
    assert in_order["urgent_s"] > 1
    assert in_order["urgent_s"] / by_priority["urgent_s"] >= 20
