"""Scripts that know nothing of gradlane print the same under torch's DDP and under `gradlane launch --ddp`."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradlane.core import files
from gradlane.core.cluster import Cluster
from gradlane.core.launch_options import LAUNCH_VARIABLE, LaunchOptions
from gradlane.core.plan import Plan
from gradlane.core.timeline import Timeline
from gradlane.live.startup import boot
from gradlane.report.page.launched import of_launch
from tests.commands import gradlane
from tests.live.script_server import SCRIPTS, ScriptServer
from tests.ports import free_port

pytestmark = pytest.mark.matrix

LIMIT_S = 120.0
SESSIONS = {
    "accumulation": 1,
    "amp": 1,
    "checkpoint_and_resume": 2,
    "compiled_blocks": 1,
    "compiled_whole": 1,
    "ema": 1,
    "frozen_backbone": 1,
    "gan": 2,
    "language": 1,
    "uneven_inputs": 0,
    "vision": 1,
}


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptServer]:
    server = ScriptServer()
    yield server
    server.close()


def script(name: str) -> Path:
    return SCRIPTS / "ddp" / f"{name}.py"


def launched(server: ScriptServer, folder: Path, name: str, options: LaunchOptions) -> tuple[str, str]:
    """What rank 0 of two prints, and its errors. The ranks begin as those of `gradlane launch`, but their torch is imported."""
    folder.mkdir()
    port = free_port()
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), LAUNCH_VARIABLE: options.to_text()}
    pids = [
        server.ask(
            run=[boot.__file__, str(script(name))],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            out=str(folder / f"out{rank}"),
            err=str(folder / f"err{rank}"),
        )
        for rank in range(2)
    ]
    for pid in pids:
        watch = os.pidfd_open(pid)
        if not select.select([watch], [], [], LIMIT_S)[0]:
            signal.pidfd_send_signal(watch, signal.SIGKILL)
        os.close(watch)
    codes = [server.ask(wait=pid) for pid in pids]
    errors = [(folder / f"err{rank}").read_text() for rank in range(2)]
    assert codes == [0, 0], "\n".join(errors)
    return (folder / "out0").read_text(), errors[0]


def plans_carried_out(folder: Path) -> list[str]:
    """The policies of the sessions that left their files in `folder`, once both ranks proved to have sent under one plan."""
    found = []
    for plan_file in sorted(folder.rglob("plan-rank0.json")):
        plan = files.read(plan_file, Plan)
        for rank in range(2):
            timeline = files.read(plan_file.with_name(f"timeline-rank{rank}.json"), Timeline)
            assert (timeline.plan, timeline.rank) == (plan.fingerprint, rank)
            assert {span.subject for span in timeline.of("send")} == set(range(len(plan.messages)))
        found.append(plan.policy)
    return found


@pytest.mark.parametrize("name", SESSIONS)
def test_a_script_prints_the_same_under_the_drop_in_and_is_scheduled(server: ScriptServer, tmp_path: Path, name: str) -> None:
    expected, _ = launched(server, tmp_path / "torchs", name, LaunchOptions())
    options = LaunchOptions(ddp=True, policy="blocks", timeline=str(tmp_path / "timeline"))
    found, errors = launched(server, tmp_path / "drop-in", name, options)
    assert found == expected
    assert expected.startswith("sha256 ")
    assert plans_carried_out(tmp_path / "timeline") == ["blocks"] * SESSIONS[name]
    assert ("torch's DistributedDataParallel sums the gradients: join()" in errors) == (name == "uneven_inputs")


def test_launch_ddp_runs_a_script_under_its_default_policy(server: ScriptServer, tmp_path: Path) -> None:
    expected, _ = launched(server, tmp_path / "torchs", "language", LaunchOptions())
    done = gradlane("launch", "--nproc", 2, "--ddp", "--timeline", tmp_path / "timeline", script("language"))
    assert done.stdout == expected
    assert len(plans_carried_out(tmp_path / "timeline")) == 1


STOCK = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
del model  # torch's own may abort the process if it outlives its group
dist.destroy_process_group()
"""
NOTHING = "gradlane: {} had no effect: the script attached nothing; add --ddp if it wraps its model in torch's"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--policy", "bytescheduler", "--tune", "--check-finite"], 0, NOTHING.format("--policy, --tune and --check-finite")),
        (["--verify"], 1, NOTHING.format("--verify")),
        (["--ddp", "--verify"], 0, ""),
        (["--report", "report.html"], 0, ""),  # that no report was written is said
        (["--report", "report.html", "--verify"], 1, NOTHING.format("--verify")),
        ([], 0, ""),
    ],
)
def test_options_without_effect_are_named(tmp_path: Path, options: list[str], code: int, said: str) -> None:
    (tmp_path / "train.py").write_text(STOCK)
    done = gradlane("launch", "--nproc", 2, *options, tmp_path / "train.py", expect=code)
    lines = [line for line in done.stderr.splitlines() if "had no effect" in line]
    assert [line.startswith(said) for line in lines] == [True] * bool(said), done.stderr


def test_a_check_that_the_drop_in_cannot_make_is_not_passed(tmp_path: Path) -> None:
    sparse = "torch.nn.Sequential(torch.nn.Embedding(9, 8, sparse=True), torch.nn.Linear(8, 8))"
    script = STOCK.replace("torch.nn.Linear(8, 8)", sparse).replace("torch.randn(4, 8)", "torch.arange(4)")
    (tmp_path / "train.py").write_text(script)
    done = gradlane("launch", "--nproc", 2, "--ddp", "--verify", tmp_path / "train.py", expect=1)
    assert "torch's DistributedDataParallel sums the gradients: 0 has sparse gradients" in done.stderr
    assert "gradlane: --verify had no effect: gradlane took over no model" in done.stderr


def test_a_script_that_is_profiled_gets_its_own_arguments(tmp_path: Path) -> None:
    script = STOCK.replace("DistributedDataParallel(torch.nn.Linear(8, 8))", "torch.nn.Linear(8, 8)")
    attached = "import gradlane\nsession = gradlane.attach(model, optimizer)\nfor _ in range(6):"
    script = "import sys\nassert sys.argv[1:] == ['--nproc', '9']\n" + script.replace("for _ in range(6):", attached)
    (tmp_path / "train.py").write_text(script)
    done = gradlane("profile", "--out", tmp_path / "out", tmp_path / "train.py", "--nproc", 9)
    assert "2 tensors" in done.stdout
    assert (tmp_path / "out" / "profile.json").exists()


@pytest.mark.parametrize("options", [["--policy", "mercury", "--backend", "server"], ["--policy", "p3"]], ids=["servers", "p3"])
def test_what_a_timeline_leaves_is_reported_beside_the_simulator(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "train.py").write_text(STOCK.replace("range(6)", "range(20)"))
    gradlane("launch", "--nproc", 2, "--ddp", *options, "--timeline", tmp_path / "left", tmp_path / "train.py")
    assert (type(files.read_where(tmp_path / "left" / "network.json")) is Cluster) == ("server" in options)
    (arm,) = of_launch(tmp_path / "left").arms
    assert arm.predicted_ms is not None
    assert arm.parts is not None


def test_launch_ddp_of_a_script_that_wraps_nothing_says_that_it_had_no_effect(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    done = gradlane("launch", "--nproc", 1, "--ddp", tmp_path / "train.py")
    assert done.stdout == "trained\n"
    assert "gradlane: --ddp had no effect: the script wrapped no model" in done.stderr


@pytest.mark.parametrize(("start", "by"), [("spawn", "address"), ("spawn", "variables"), ("fork", "variables")])
@pytest.mark.extra
def test_ranks_that_the_script_starts_itself_take_part_in_one_process_of_the_launcher(start: str, by: str) -> None:
    found = []
    for ddp in ([], ["--ddp", "--policy", "blocks"]):
        given = [SCRIPTS / "own_ranks.py", "--start", start, "--by", by, "--port", free_port()]
        done = gradlane("launch", "--nproc", 1, *ddp, *given)
        assert "had no effect" not in done.stderr
        found.append(done.stdout.split(" sha256 "))
    (torchs, expected), (ours, digest) = found
    assert (torchs, ours) == ("scheduled False", "scheduled True")
    assert digest == expected


@pytest.mark.extra
def test_several_processes_of_the_launcher_that_start_the_same_ranks_are_refused() -> None:
    given = [SCRIPTS / "own_ranks.py", "--start", "spawn", "--by", "address", "--port", free_port()]
    done = gradlane("launch", "--nproc", 2, "--ddp", *given, expect=1)
    assert "from ranks 0 and 1 of gradlane launch, expected it from one" in done.stderr
    assert "Start it with gradlane launch --nproc 1" in done.stderr
