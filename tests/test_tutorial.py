"""docs/tutorial.md is followed to the letter: its script is saved, and its commands run, in order."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from gradlane import lab
from tests.commands import ROOT, command_line
from tests.test_docs import STARTS, blocks, commands

TUTORIAL = "docs/tutorial.md"
SECONDS = 120
LEFT_TO_OTHER_TESTS = {
    "gradlane compare",  # two minutes; tests/live/test_comparison.py runs it for less
    "gradlane launch --nproc 2 --policy bytescheduler train.py",  # tests/lab/test_launch.py launches with policies
}


def saved_as(text: str, script: str) -> str:
    """The name under which the tutorial asks to save a script."""
    before = text[: text.index(script)]
    return re.findall(r"save it as\s+`([^`]+)`", before)[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tutorial")
    script = next("\n".join(block.lines) for block in blocks(TUTORIAL) if block.language == "python")
    (made / saved_as((ROOT / TUTORIAL).read_text(), script)).write_text(script)
    return made


def shown_after(command: str) -> list[str]:
    """The lines of the block that follows a command's own."""
    found = list(blocks(TUTORIAL))
    at = next(place for place, block in enumerate(found) if command in block.lines)
    following = found[at + 1] if at + 1 < len(found) else None
    runs = following is None or following.language == "python" or any(STARTS.fullmatch(line) for line in following.lines)
    return [] if runs else list(following.lines)


def steady(line: str) -> str:
    """A line of output without what differs from machine to machine."""
    return " ".join(re.sub(r"[\d.]+( ms| us| s)?%?|[│┃]", " ", line).split())


@pytest.mark.extra
def test_the_tutorial_does_what_it_says(folder: Path) -> None:
    ran = []
    for command in commands(TUTORIAL):
        if command.text in LEFT_TO_OTHER_TESTS or command.words[0] not in ("gradlane", "torchrun"):
            continue
        if command.words[1] == "lab" and lab.supported() is not None:
            continue
        words = command_line(*command.words[1:])
        if command.words[0] == "torchrun":
            words = [words[0], "-m", "torch.distributed.run", *command.words[1:]]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        printed = {steady(line) for line in done.stdout.splitlines()}
        missing = [line for line in shown_after(command.text) if line != "..." and steady(line) not in printed]
        assert not missing, f"{command}: not printed: {missing}\n{done.stdout}"
        ran.append(command.words[:2])
    in_lab = ["lab"] if lab.supported() is None else []
    assert [words[1] for words in ran if words[0] == "gradlane"] == ["profile", "plan", "plan", *in_lab, "launch"]
