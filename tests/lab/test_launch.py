"""`gradlane launch`: what reaches the script, what is refused before anything starts, and how a failure is told."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from gradlane.core import files
from gradlane.core.launch_options import LAUNCH_VARIABLE, LaunchOptions
from gradlane.core.plan import Message, Plan, Slice
from gradlane.core.profile import TensorSpec
from gradlane.errors import PeerDied, PeerFailed
from tests.commands import gradlane, invoke

LIMIT_SECONDS = 120  # for torch to be imported by the launcher and by two ranks, on a busy machine

# rank 1 fails when rank 0 has written its file, since torchrun then ends rank 0
SCRIPT = """
import json, os, sys
names = [name for name in os.environ if name.startswith("GRADLANE_")]
seen = {"arguments": sys.argv[1:], "rank": os.environ["RANK"], **{name: os.environ[name] for name in names}}
here = os.path.dirname(__file__)
with open(os.path.join(here, os.environ["RANK"] + ".json"), "w") as file:
    json.dump(seen, file)
with open(os.path.join(here, "fifo"), "w" if os.environ["RANK"] == "0" else "r"):
    sys.exit(7 if os.environ["RANK"] == "1" else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    os.mkfifo(tmp_path / "fifo")
    return path


def test_options_reach_the_script_and_a_failing_rank_is_named(script: Path) -> None:
    options = ["--nproc", "2", "--policy", "bytescheduler", "--knob", "partition_bytes=1MiB", "--max-restarts", "0"]
    servers = ["--backend", "server", "--packet-bytes", "16KiB", "--summation-order", "rank", "--wire-dtype", "bf16"]
    own = ["--policy", "its own", "--", "--help"]
    earlier = script.parent / "report.html"
    earlier.write_text("of an earlier job")
    report = ["--report", earlier]
    done = gradlane("launch", *options, "--timeout", 30, *servers, *report, script, *own, expect=7, timeout=LIMIT_SECONDS)
    seen = [json.loads((script.parent / f"{rank}.json").read_text()) for rank in range(2)]
    assert [one["rank"] for one in seen] == ["0", "1"]
    assert [one["arguments"] for one in seen] == [own] * 2
    expected = LaunchOptions(
        policy="bytescheduler",
        policy_knobs={"partition_bytes": 1 << 20},
        timeout=30,
        backend="server",
        packet_bytes=16 << 10,
        summation_order="rank",
        wire_dtype="bf16",
    )
    given = [replace(LaunchOptions.from_environment(one), attached=None, timeline=None) for one in seen]
    assert given == [expected] * 2
    assert "gradlane: no report was written: no rank of this node attached gradlane and ended its session\n" in done.stderr
    assert not earlier.exists()
    assert "gradlane: rank 1 ended with exit code 7" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--polcy", "wfbp", "SCRIPT"], "launch: got --polcy (did you mean --policy?), expected an option that it has"),
        (["--policy", "nobody", "SCRIPT"], "got 'nobody', expected one of wfbp, ddp"),
        (["--policy", "wfbp", "--plan", "plan.json", "SCRIPT"], "expected one or the other"),
        (["--plan", "not-there.json", "SCRIPT"], "got 'not-there.json', which is not a file"),
        (["--knob", "partition_bytes", "SCRIPT"], "got 'partition_bytes', expected NAME=VALUE"),
        (["--timeout", "soon", "SCRIPT"], "got 'soon', expected seconds"),
        (["--stall-timeout", "0.2", "SCRIPT"], "got 0.2, expected seconds, from 1 to 86400"),
        (["--backend", "nccl", "SCRIPT"], "--backend: got 'nccl', expected one of all-reduce, server"),
        (["--packet-bytes", "many", "SCRIPT"], "got 'many'"),
        (["--module", "SCRIPT"], "expected a SCRIPT"),
        (["--policy", "wfbp", "not-there.py"], "got 'not-there.py', which is not a file"),
        (["--nproc", "2"], "got no SCRIPT"),
        (["--nproc", "banana", "SCRIPT"], "gradlane: --nproc: got 'banana', expected a number, 1 or more, or auto"),
        (["--nproc", "1000000", "SCRIPT"], "gradlane: --nproc: got 1000000 processes, which need"),
        (["--nproc", "0", "SCRIPT"], "gradlane: --nproc: got '0', expected a number, 1 or more"),
        (["--nproc-per-node", "-1", "SCRIPT"], "gradlane: --nproc: got '-1', expected a number, 1 or more"),
        (["--nnodes", "x", "SCRIPT"], "gradlane: --nnodes: got 'x', expected a number, 1 or more, or MIN:MAX"),
        (["--policy", "mercury", "--backend", "all-reduce", "SCRIPT"], "--policy: got mercury, which all-reduce cannot carry"),
        (
            ["--policy", "dear", "--backend", "server", "--servers", "1", "SCRIPT"],
            "--policy: got dear, which server with servers",
        ),
        (["--plan", "PLAN", "--backend", "all-reduce", "SCRIPT"], "plan mercury: wire 'packet-priority' needs"),
        (["--packet-bytes", "100", "SCRIPT"], "--packet-bytes: got 100, expected a multiple of 64"),
        (["--packet-bytes", "4k", "--backend", "all-reduce", "SCRIPT"], "packets are of backend='server'"),
        (["--packet-bytes", "0", "SCRIPT"], "got '0', expected one byte or more"),
        (["--algorithm", "ring", "SCRIPT"], "--algorithm: got 'ring', expected one of flat, hierarchical"),
        (["--algorithm", "flat", "--backend", "server", "SCRIPT"], "expected it with all-reduce"),
        (["--timeline", "\udcff", "SCRIPT"], "\\udcff', whose name is not UTF-8, expected one that is; give another"),
        (["--timeline", "/proc/gradlane", "SCRIPT"], "--timeline: got '/proc/gradlane', which cannot be made a folder"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(script: Path, options: list[str], said: str) -> None:
    plan = script.with_name("plan")
    files.write(plan, Plan("mercury", "m", (TensorSpec("a", 4),), (Message((Slice(0, 0, 4),)),), wire="packet-priority"))
    given = {"SCRIPT": str(script), "PLAN": str(plan)}
    arguments = ["launch", *(given.get(option, option) for option in options)]
    assert said in invoke(*arguments, code=2)
    assert not list(script.parent.glob("*.json"))


@pytest.mark.parametrize("is_elastic", [False, True])
def test_what_an_earlier_job_left_goes_before_the_ranks_start_and_nothing_else(
    script: Path, monkeypatch: pytest.MonkeyPatch, is_elastic: bool
) -> None:
    monkeypatch.setenv(LAUNCH_VARIABLE, "")
    folder = script.parent / "timeline"
    (folder / "session-2").mkdir(parents=True)
    earlier = {folder / name for name in ("timeline-rank2.json", "plan-rank2.json", "profile.json", "session-2/network.json")}
    plan, own = folder / "plan-rank0.json", folder / "weights.json"
    for path in (*earlier, own):
        path.touch()
    files.write(plan, Plan("wfbp", "m", (TensorSpec("a", 4),), (Message((Slice(0, 0, 4),)),), sequence=(0,)))
    options = ["--timeline", folder, "--plan", plan, *(["--nnodes", "1:2"] if is_elastic else [])]
    # torchrun refuses it when all options of gradlane have been looked at
    assert "gradlane: torchrun: " in invoke("launch", *options, "--rdzv-backend", "nobody", script, code=2)
    assert set(folder.rglob("*.json")) == {plan, own, *(earlier if is_elastic else ())}


def test_an_earlier_file_that_cannot_be_removed_is_named(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    (script.parent / "profile.json").touch()
    monkeypatch.setattr(Path, "unlink", refuse)  # root may remove what a folder's mode denies
    said = invoke("launch", "--timeline", script.parent, script, code=2)
    assert f"--timeline: got '{script.parent}', whose profile.json of an earlier run cannot be removed (Operation not" in said


def test_help_shows_our_options_first() -> None:
    help_text = invoke("launch", "--help")
    assert help_text.startswith("usage: gradlane launch [OPTIONS] [TORCHRUN OPTIONS] SCRIPT [ARGS]...")
    for option in (
        "--nproc",
        "--policy",
        "--knob",
        "--plan",
        "--network",
        "--timeline",
        "--timeout",
        "--stall-timeout",
        "--rdzv-endpoint",
    ):
        assert option in help_text


FAILS = """
import torch
from torch import nn, optim
from torch.distributed import get_rank, init_process_group

init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = optim.SGD(model.parameters(), 0.1)
for step in range(100):
    if step == 10 and get_rank() == 1:
        raise LookupError("by the test")
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""


ENDS_LATE = """
import sys
import torch
from torch import nn, optim
from torch.distributed import init_process_group

init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = optim.SGD(model.parameters(), 0.1)
for step in range(10):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
sys.exit(3)
"""


@pytest.mark.extra
def test_a_job_that_fails_behind_its_sessions_has_a_report(tmp_path: Path) -> None:
    script, report = tmp_path / "script.py", tmp_path / "report.html"
    script.write_text(ENDS_LATE)
    options = ["--nproc", "2", "--ddp", "--policy", "wfbp", "--report", report]
    done = gradlane("launch", *options, script, expect=3, timeout=LIMIT_SECONDS)
    assert done.stdout == f"{report} is a report that opens in a browser\n"
    assert "ended with exit code 3, the first of" in done.stderr.splitlines()[-1]
    assert report.exists()


def test_the_last_line_names_the_rank_that_failed_and_not_one_that_heard_of_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    done = gradlane("launch", "--nproc", "2", "--ddp", "--policy", "blocks", script, expect=1, timeout=LIMIT_SECONDS)
    last = done.stderr.splitlines()[-1]
    # torchrun may see rank 0 end while rank 1 still prints its traceback
    heard = "gradlane: rank 0 ended with exit code 1: PeerFailed: rank 1 failed: LookupError: by the test"
    assert last == heard or re.fullmatch("gradlane: rank 1 ended with exit code 1, the first of [12] to fail; its own .*", last)


@pytest.mark.parametrize(
    ("told", "said", "exit_code"),
    [
        (
            PeerFailed("rank 1 failed: LookupError: by the test", 1),
            "rank 0 ended with exit code 1: PeerFailed: rank 1 failed",
            1,
        ),
        (PeerDied("rank 1 is gone", 1), "rank 1 was ended by SIGTERM, the first of 2 to fail", 143),
    ],
)
def test_a_rank_that_torchrun_ended_while_it_still_said_why_it_failed_was_not_ended_by_a_signal(
    tmp_path, monkeypatch, told, said, exit_code
):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, get_error_handler

    from gradlane.live.startup.torchrun import failure_of

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0.json"))
    get_error_handler().record_exception(told)
    failures = {
        0: ProcessFailure(0, 1000, 1, str(tmp_path / "0.json")),
        1: ProcessFailure(1, 1001, -signal.SIGTERM, str(tmp_path / "1.json")),
    }
    failure = failure_of(failures)
    assert str(failure).startswith(said)
    assert failure.exit_code == exit_code


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            {0: PeerFailed("rank 2 failed", 2), 1: PeerDied("rank 2 is gone", 2)},
            "rank 2 was ended by SIGKILL, the first of 3 to fail; a process that is killed says nothing",
        ),
        ({0: PeerDied("rank 2 is gone", 2), 1: ValueError("its own"), 2: ValueError("later")}, "rank 1 ended with exit code 1"),
        (dict.fromkeys(range(3), PeerDied("rank 5 is gone", 5)), "rank 0 ended with exit code 1: PeerDied: rank 5 is gone"),
    ],
)
def test_a_rank_that_failed_because_of_another_is_named_only_where_nothing_else_is_known(tmp_path, monkeypatch, written, said):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, get_error_handler

    from gradlane.live.startup.torchrun import failure_of

    failures = {}
    for rank in range(3):
        file = tmp_path / f"{rank}.json"
        if rank in written:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
            get_error_handler().record_exception(written[rank])
        failures[rank] = ProcessFailure(rank, 1000 + rank, 1 if rank in written else -9, str(file))
    failure = failure_of(failures)
    assert str(failure).startswith(said)
    assert failure.exit_code == (137 if "SIGKILL" in said else 1)
