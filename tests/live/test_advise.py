"""gradlane advise: a script that knows nothing of it is measured, ended, and leaves no process behind."""

from __future__ import annotations

import json
import os
from io import StringIO
from pathlib import Path

import pytest

from gradlane.live.ddp.stages import Progress, Stage
from tests.commands import gradlane
from tests.ports import free_port

pytestmark = pytest.mark.matrix

SCRIPT = Path(__file__).parent / "scripts" / "watched.py"


def marked(mark: str) -> list[int]:
    """The processes that have `mark` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize("holds", [pytest.param([], marks=pytest.mark.extra), ["holds"]])
def test_a_script_is_measured_and_ended_without_its_help(tmp_path, holds):
    script = tmp_path / "of_this_test.py"
    script.write_text(SCRIPT.read_text())
    report = tmp_path / "report.html"
    done = gradlane("advise", "--steps", 4, "--json", "--report", report, script, 100_000, *holds)
    said = json.loads(done.stdout)
    assert marked(str(script)) == []
    assert said["workers"] == 2
    assert len(said["measured_step_ns"]) == 4
    assert said["waits_ns"] <= said["step_ns"]
    assert {"ddp", "blocks", "mg-wfbp"} <= {row["policy"] for row in said["policies"]}
    assert said["bound_ns"] <= min(row["iteration_ns"] for row in said["policies"])
    assert any("the script has a GradScaler and clips gradients by their norm" in line for line in said["not_measured"])
    assert report.read_bytes().startswith(b"<!doctype html>")
    stages = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert [line.partition(" ")[0] for line in stages] == [f"[{stage}/5]" for stage in range(1, 6)]
    assert "[2/5] measuring 4 steps as they are" in stages


ATTACHES = """
import gradlane, torch
torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
gradlane.HOW(model, torch.optim.SGD(model.parameters(), 0.1))
raise LookupError("nothing ended the script")
"""
ITSELF = (
    "the script attaches gradlane itself, and advice is for torch's DistributedDataParallel; `gradlane launch --progress 10`"
)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("", "the script wrapped no model in torch's DistributedDataParallel\n"),
        (SCRIPT.read_text(), "the script ended after 3 steps, expected 17; let it train longer, or give fewer --steps"),
        (ATTACHES.replace("HOW", "attach"), ITSELF),
        (ATTACHES.replace("HOW", "attach_to_servers"), ITSELF),
        ("raise ValueError('no data')", "the script failed after 0 steps: ValueError: no data"),
    ],
)
def test_what_cannot_be_measured_is_said(tmp_path, monkeypatch, lines, why):
    port = free_port()
    # the one rank of a job, which costs less than torchrun
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    script = tmp_path / "script.py"
    script.write_text(lines)
    done = gradlane("advise", "--steps", 4, script, 3, expect=1)
    assert f"gradlane: advise: nothing was measured: {why}" in done.stderr


def test_a_script_that_does_not_come_to_its_steps_is_ended(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text("import threading\nthreading.Event().wait()\n")
    done = gradlane("advise", "--timeout", 3, script, expect=1)
    assert "advise: no end of the steps within 3 s" in done.stderr
    assert marked(str(script)) == []


class Terminal(StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (StringIO, ["[1/3] as they are", "[2/3] the network", "[3/3] alone"]),
        (Terminal, ["[1/3] as they are: step 3, 1.70 s each", "[2/3] the network", "[3/3] alone: step 3, 1.70 s each"]),
    ],
)
def test_a_terminal_sees_each_step_and_a_log_each_stage(stream, said):
    out = stream()
    progress = Progress([Stage(0, 3, "as they are"), Stage(3, 0, "the network"), Stage(3, 3, "alone")], out)
    ends_ns: list[int] = []
    progress.show(0, ends_ns)
    for step in range(1, 6):
        ends_ns.append(step * 1_700 * 10**6)
        if step == 3:
            progress.show(step, ends_ns, between=True)
        progress.show(step, ends_ns)
    progress.end()
    assert [line.rpartition("\x1b[K")[2] for line in out.getvalue().split("\n")[:-1]] == said
