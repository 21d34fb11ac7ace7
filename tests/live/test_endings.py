"""However a command ends, what it started ends with it, and its temporary folder goes."""

from __future__ import annotations

import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gradlane import lab
from tests.live.endings import COMMANDS, NEEDS_LAB, Run, ended_after

pytestmark = pytest.mark.matrix

MOMENTS = 4
"""Of the first three seconds, at which each command is interrupted here; `python -m tests.live.endings` tries all."""


def need_lab(name: str) -> None:
    if name in NEEDS_LAB and lab.supported() is not None:
        pytest.skip(str(lab.supported()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_ended_leaves_nothing(name: str, number: signal.Signals, tmp_path: Path) -> None:
    need_lab(name)
    with Run(name, tmp_path) as run:
        run.wait_for_a_rank()
        assert run.end(number) == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupt_is_heard_at_any_moment(name: str) -> None:
    need_lab(name)
    drawn = random.Random(name)
    moments = [3.0 * (place + drawn.random()) / MOMENTS for place in range(MOMENTS)]
    with ThreadPoolExecutor(MOMENTS) as several:
        found = list(several.map(lambda moment: ended_after(name, moment, signal.SIGINT), moments))
    assert dict(zip(moments, found, strict=True)) == dict.fromkeys(moments, "")
