"""A link that goes down, between hosts of a lab: no end of a connection is ever told, and both sides find out in time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gradlane import lab
from tests.commands import gradlane
from tests.processes import AT_ONCE_S

pytestmark = pytest.mark.matrix

SCRIPT = Path(__file__).with_name("linkdown.py")


@pytest.fixture(scope="module", autouse=True)
def _lab_is_supported() -> None:
    reason = lab.supported()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("task", ["idle", "sending"])
def test_a_link_that_goes_down_stalls_both_ends_in_seconds(task: str) -> None:
    done = gradlane("lab", "--quiet", "--hosts", 2, "--link", "200mbit", "--", sys.executable, SCRIPT, task, timeout=60)
    told = sorted((json.loads(line.removeprefix("[1] ")) for line in done.stdout.splitlines()), key=lambda each: each["rank"])
    assert [(each["rank"], each["error"], each["blames"]) for each in told] == [(0, "PeerStalled", 1), (1, "PeerStalled", 0)]
    assert all(each["seconds"] <= 3 + AT_ONCE_S for each in told), told
