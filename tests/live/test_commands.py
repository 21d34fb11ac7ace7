"""The commands as a user calls them: real processes on loopback, and in a lab where the kernel permits one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gradlane import lab
from gradlane.compare.records import Comparison
from gradlane.core import files
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.profile import BEFORE_FIRST_USE, UNTIL_BACKWARD, Profile
from gradlane.core.timeline import Timeline
from gradlane.report.page import read_run, render_page
from gradlane.report.page.drawing import SHOWN
from tests.commands import EXAMPLE, command_line, gradlane


def check_comparison(folder: Path, policies: list[str], *, links: bool) -> None:
    comparison = Comparison.from_json((folder / "comparison.json").read_bytes())
    assert [result.policy for result in comparison.results] == ["torch-ddp", *policies]
    assert all(result.equal_to_ddp for result in comparison.results)
    assert all(len(result.step_ns) == 2 for result in comparison.results)
    assert len({result.loss for result in comparison.results}) == 1  # after the same step, though the first policy ran more
    trace = json.loads((folder / "timeline.json").read_text())
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    shown = ["rank 0", "rank 1", "links"] if links else ["rank 0", "rank 1"]
    assert names == {f"{policy} {what}" for policy in policies for what in shown}
    (trial,) = read_run(folder).trials
    assert [arm.name for arm in trial.arms] == ["torch-ddp", *policies]
    assert (trial.baseline, trial.limit) == ("torch-ddp", comparison.bound and comparison.bound.ratio)
    assert trial.recommended in policies
    assert f"With {trial.recommended}, training is" in trial.answer
    for arm in trial.arms:
        assert arm.timeline is not None
        assert arm.plan is not None
        assert len(arm.timeline.iterations) == 2 * SHOWN
        assert [rank.rank for rank in arm.timeline.ranks] == [0, 1]
        messages = len(arm.plan.messages) * SHOWN
        assert [len(rank.messages[0]) for rank in arm.timeline.ranks] == [messages, messages]
        assert bool(arm.timeline.links) == links
    assert (folder / "report.html").read_bytes() == render_page(read_run(folder))


@pytest.mark.extra
def test_compare_on_loopback_prints_a_table_and_leaves_it_as_json_and_as_a_trace(tmp_path: Path) -> None:
    options = ["--loopback", "--turns", 1, "--steps", 2, "--batch-size", 4, "--policies", "blocks,mg-wfbp", "--out", tmp_path]
    for name in ("timeline-blocks-rank2.json", "links.jsonl", "network-torch-ddp-rank0.json"):
        (tmp_path / name).write_text("of an earlier run")
    done = gradlane("compare", *options)
    assert "torch-ddp" in done.stdout
    assert "[  8/8]" in done.stderr
    check_comparison(tmp_path, ["blocks", "mg-wfbp"], links=False)


@pytest.mark.extra
def test_compare_in_a_lab_as_make_run_does(tmp_path: Path) -> None:
    reason = lab.supported()
    if reason is not None:
        pytest.skip(reason)
    options = ["--link", "1gbit", "--turns", 1, "--steps", 2, "--batch-size", 4, "--policies", "p3", "--out", tmp_path]
    gradlane("compare", *options)
    check_comparison(tmp_path, ["p3"], links=True)


@pytest.mark.extra
def test_compare_of_a_model_puts_the_simulator_beside_each_arm_and_goes_on_where_it_was(tmp_path: Path) -> None:
    reason = lab.supported()
    if reason is not None:
        pytest.skip(reason)
    options = ["resnet18", "--link", "10gbit", "--scale", "0.02", "--turns", 1, "--steps", 1, "--backend", "all-reduce,server"]
    chosen = ["--policies", "blocks,mercury", "--out", tmp_path]
    done = gradlane("compare", *options, *chosen)
    assert "trial 1 of 1: resnet18 on 2 hosts, links of 10 Gbit/s, x 0.02\n" in done.stderr
    cells = json.loads((tmp_path / "sweep.json").read_bytes())["body"]["cells"]
    assert [cell["arm"] for cell in cells] == ["torch-ddp", "blocks", "blocks@server", "mercury@server"]
    for cell in cells:
        assert cell["equal_to_ddp"]
        assert cell["bound_ns"] <= cell["predicted_ns"]
        assert len(cell["step_ns"]) == 1
    assert "simulator: error" in done.stdout
    again = gradlane("compare", *options, *chosen, "--json")
    assert "from before" in again.stderr
    assert json.loads(again.stdout)["body"]["cells"] == cells
    (trial,) = read_run(tmp_path).trials
    assert [arm.name for arm in trial.arms] == [cell["arm"] for cell in cells]
    assert all(arm.predicted_ms is not None for arm in trial.arms)
    assert trial.baseline == "torch-ddp"
    assert trial.recommended in [arm.name for arm in trial.arms[1:]]
    assert trial.limit == pytest.approx((trial.arms[0].median_ms or 0) / min(arm.bound_ms or 0 for arm in trial.arms))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--hosts", "2,4"], "expected a MODEL with them"),
        (["--servers", 1], "expected a MODEL, --backend server and emulated hosts"),
        (["--backend", "nccl"], "got 'nccl', expected all-reduce, server or any"),
        (["--backend", "all-reduce", "--policies", "mercury"], "got mercury, which all-reduce cannot carry"),
        (["--all", "--policies", "p3"], "--all: got it with --policies"),
        (["vgg77"], "vgg77"),
    ],
)
def test_compare_refuses_what_it_cannot_compare(options: list[object], text: str) -> None:
    assert text in " ".join(gradlane("compare", *options, expect=2).stderr.split())


def test_an_unknown_policy_is_refused_before_anything_starts() -> None:
    assert "expected one of wfbp" in gradlane("compare", "--policies", "fastest", expect=2).stderr


@pytest.mark.extra
def test_probe_writes_a_network_that_plan_reads_beside_the_profile_of_a_script(tmp_path: Path) -> None:
    gradlane("probe", "--seconds", 1, "--out", tmp_path / "network.json")
    assert files.read(tmp_path / "network.json", Network).workers == 2
    done = gradlane("profile", "--nproc", 2, "--out", tmp_path, "--json", EXAMPLE)
    profile = files.read(tmp_path / "profile.json", Profile)
    assert files.loads(done.stdout.encode(), Profile) == profile
    assert EXAMPLE.with_suffix(".out").read_text().splitlines()[0] in done.stderr.splitlines()
    assert [tensor.spec.name for tensor in profile.tensors][-1] == "0.weight"
    assert [layer.name for layer in profile.layers] == [BEFORE_FIRST_USE, "0", "2", "4", UNTIL_BACKWARD]
    gradlane("plan", tmp_path / "profile.json", tmp_path / "network.json", "--policy", "p3", "--out", tmp_path / "plan.json")
    options = ["--nproc", 2, "--plan", tmp_path / "plan.json", "--timeline", tmp_path / "out"]
    done = gradlane("launch", *options, EXAMPLE)
    assert done.stdout.splitlines() == EXAMPLE.with_suffix(".out").read_text().splitlines()
    plan = files.read(tmp_path / "plan.json", Plan)
    assert files.read(tmp_path / "out" / "timeline-rank1.json", Timeline).plan == plan.fingerprint


def interrupted(process: subprocess.Popen[str]) -> list[str]:
    """The lines on stderr of a command that Ctrl-C ends: SIGINT, as from a terminal, to its whole group."""
    os.killpg(process.pid, signal.SIGINT)
    lines = process.communicate(timeout=120)[1].splitlines()
    assert process.returncode == 130, lines
    return lines


def start(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command_line(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # else torchrun says that it sets it
        start_new_session=True,
        # what a shell starts in the background ignores SIGINT, and so would these
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


NO_REPORT = "gradlane: no report was written: no rank of this node attached gradlane and ended its session"


@pytest.mark.parametrize(("command", "said"), [(["launch", "--report", "report.html"], [NO_REPORT]), (["profile"], [])])
def test_an_interrupt_of_a_script_is_one_line_and_leaves_no_rank(command: list[str], said: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nos.write(1, b'%d\\n' % os.getpid())  # whole: print writes twice\nsignal.pause()\n")
    process = start(tmp_path, *command, "--nproc", 2, script)
    assert process.stdout is not None
    ranks = [int(process.stdout.readline()) for _ in range(2)]
    assert interrupted(process) == [*said, "gradlane: interrupted"]
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


def test_the_exit_code_of_a_rank_is_that_of_the_command_and_is_said_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.exit(3)\n")
    said = gradlane("profile", "--nproc", 2, "--out", tmp_path / "out", script, expect=3).stderr
    assert set(re.findall("ended with exit code ([0-9]+)", said)) == {"3"}


_LEAVES = """
import sys
import torch, torch.distributed as dist, gradlane
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
gradlane.attach_to_servers(model, optimizer, staleness=None)
for step in range(10**9):
    if step == 3 and dist.get_rank() == 1:
        sys.exit(3)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_a_rank_that_leaves_by_an_exit_code_ends_ranks_that_wait_for_nobody(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_LEAVES)
    done = gradlane("launch", "--standalone", "--nproc", 2, script, expect=3)
    assert "gradlane: rank 1 ended with exit code 3" in done.stderr
    assert "rank 1 failed: SystemExit: 3" in done.stderr


@pytest.mark.parametrize("where", ["--loopback", "--link=10gbit"])
def test_an_interrupt_of_a_comparison_is_one_line(where: str, tmp_path: Path) -> None:
    if where != "--loopback" and lab.supported() is not None:
        pytest.skip(str(lab.supported()))
    process = start(tmp_path, "compare", "resnet18", where, "--scale", "0.02")
    assert process.stderr is not None
    assert process.stderr.readline().startswith("trial 1 of 1")
    assert interrupted(process) == ["gradlane: interrupted"]


@pytest.mark.extra
def test_the_example_gives_its_output_under_plain_torchrun() -> None:
    options = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(EXAMPLE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == EXAMPLE.with_suffix(".out").read_text().splitlines()
