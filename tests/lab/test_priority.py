"""`gradlane probe --priority` between emulated hosts: ports that serve by class, and ports that do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.commands import gradlane

EVERY_MARK = {str(dscp): [dscp] for dscp in (46, 34, 26, 18, 10, 0)}


def probed(*arguments: str) -> dict[str, Any]:
    done = gradlane("probe", "--priority", "--link", "200mbit", "--seconds", 1, "--json", *arguments, timeout=60)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.timing
@pytest.mark.parametrize("senders", ["1", "2"])
def test_a_port_that_serves_by_class_lets_the_marked_first(senders: str) -> None:
    found = probed("--classes", "2", "--senders", senders)
    assert found["arrived"] == EVERY_MARK
    assert found["survives"] is True
    assert found["wins"] is True
    assert found["marked_bytes_per_second"] > 15e6


@pytest.mark.timing
def test_a_port_that_does_not_leaves_the_other_its_share() -> None:
    found = probed()
    assert found["arrived"] == EVERY_MARK
    assert found["survives"] is True
    assert found["wins"] is False
    assert found["marked_bytes_per_second"] + found["unmarked_bytes_per_second"] > 15e6
