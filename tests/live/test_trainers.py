"""Trainers of others, with the real libraries on two ranks: the bits of their own DDP, and updates deferred.

They run where the extra `trainers` is installed, as `make test-trainers` does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gradlane.core import files
from gradlane.core.launch_options import LAUNCH_VARIABLE, LaunchOptions
from gradlane.errors import UnsupportedError
from tests.commands import ROOT, command_line
from tests.live.loops import GIVEN

pytestmark = pytest.mark.matrix

SCRIPTS = ROOT / "tests" / "live" / "scripts" / "trainers"
EXAMPLES = ROOT / "examples" / "trainers"
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
    "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1",
]  # fmt: skip
LAUNCH = command_line("launch", "--ddp", "--nproc", "2")
KNOBS: dict[str, int | float | str] = {"partition_bytes": 2000, "credit_bytes": 8000}
POLICY = ["--policy", "bytescheduler", *(f"--knob={name}={value}" for name, value in KNOBS.items())]


@dataclass(frozen=True)
class Trainer:
    """A library's trainer: its script's name, its example's name, and what it can do beside what all can.

    reads_gradients: before each step, also where it does not clip; unless the module of `gradlane.integrations` keeps it
    from that.
    starts_ranks: its script starts the ranks itself and needs neither torchrun nor `gradlane launch`.
    """

    package: str
    script: str
    example: str
    more: tuple[str, ...] = ()
    reads_gradients: bool = False
    starts_ranks: bool = False

    def torchrun(self) -> list[str]:
        """What starts the script where torch's class is what it was."""
        return [sys.executable] if self.starts_ranks else TORCHRUN

    def launch(self, network: Path | None = None) -> list[str]:
        """What starts the script where gradlane's class is in the place of torch's.

        Args:
            network: a file; sessions take it, and bytescheduler with `KNOBS`.
        """
        if not self.starts_ranks:
            return LAUNCH if network is None else [*LAUNCH, *POLICY, "--network", str(network)]
        said = LaunchOptions(policy="bytescheduler", policy_knobs=KNOBS, network=str(network)) if network else LaunchOptions()
        return ["env", f"{LAUNCH_VARIABLE}={said.to_text()}", sys.executable]

    @property
    def cases(self) -> tuple[str, ...]:
        return ("plain", "accumulation", "clipping", "resuming", *self.more)


TRAINERS = {
    "accelerate": Trainer("accelerate", "accelerated", "accelerate_training", more=("triggered",)),
    "transformers": Trainer("transformers", "transformed", "transformers_training", reads_gradients=True),
    "lightning": Trainer("lightning", "lightened", "lightning_training", more=("manual",)),
    "fabric": Trainer("lightning", "fabricated", "fabric_training"),
    "ray": Trainer("ray", "ray_trained", "ray_training", starts_ranks=True),
}
each_trainer = pytest.mark.parametrize("name", TRAINERS)


def installed(name: str) -> Trainer:
    trainer = TRAINERS[name]
    if importlib.util.find_spec(trainer.package) is None:
        pytest.skip(f"{trainer.package} is not installed; make test-trainers installs it")
    return trainer


def run(*command: object) -> str:
    words = [str(word) for word in command]
    # Ray keeps files at home, and sockets in its own folder; a socket's path has 107 bytes at most, too few for pytest's
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as home:
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HOME": home,
            "RAY_TMPDIR": home, "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback only
            "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # with which a worker's line is printed twice
        }  # fmt: skip
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def outcomes(folder: Path, start: list[str], trainer: Trainer, arms: list[str]) -> list[dict[str, dict[str, Any]]]:
    """What the script of `trainer`, begun by `start`, left of `arms`, by rank."""
    folder.mkdir()
    run(*start, SCRIPTS / f"{trainer.script}.py", folder, *arms)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@each_trainer
def test_a_trainer_gives_the_bits_of_its_own_ddp_and_defers_updates(tmp_path: Path, name: str) -> None:
    trainer = installed(name)
    files.write(tmp_path / "network.json", GIVEN)
    own = [f"{arm}/{case}" for arm in ("ddp", "integration") for case in trainer.cases]
    by_torchrun = outcomes(tmp_path / "torchrun", trainer.torchrun(), trainer, own)
    launch = trainer.launch(tmp_path / "network.json")
    by_launch = outcomes(tmp_path / "launch", launch, trainer, [f"launch/{case}" for case in trainer.cases])
    for rank in range(2):
        found = {**by_torchrun[rank], **by_launch[rank]}
        for arm in ("integration", "launch"):
            for case in trainer.cases:
                one, reference = found[f"{arm}/{case}"], found[f"ddp/{case}"]
                assert one["digest"] == reference["digest"], f"rank {rank}: {arm}/{case}"
                reads = case == "clipping" or (trainer.reads_gradients and arm == "launch")
                assert (one["deferred"] == 0) == reads, f"rank {rank}: {arm}/{case}"
                lines = [line for line in one["lines"] if "waiting for it" not in line]  # the machine has other work
                assert len(lines) == (reads and rank == 0), lines
                place = rf"(\S+/\S+|{trainer.script})\.py:\d+"  # of a library, from its package on, or of the script
                assert all(re.search(f"{place} reads gradients .* between backward and step", line) for line in lines)


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("accelerate", [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
                        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
                        "--main_process_port", "0"]),  # torchrun; --cpu would ask for MPI
        ("lightning", [sys.executable]),
        ("fabric", [sys.executable]),
    ],
)  # fmt: skip
def test_a_trainer_may_be_started_in_its_own_way(tmp_path: Path, name: str, start: list[str]) -> None:
    trainer = installed(name)
    for found in outcomes(tmp_path / "own", start, trainer, ["ddp/plain", "integration/plain"]):
        assert found["integration/plain"]["digest"] == found["ddp/plain"]["digest"]
        assert found["integration/plain"]["deferred"] > 0


@each_trainer
def test_an_example_trains_as_under_torchs_class(name: str) -> None:
    trainer = installed(name)
    script = EXAMPLES / f"{trainer.example}.py"
    # Ray puts the name of a worker before each of its lines
    lines = re.findall(r"step \d+: loss [\d.]+", run(*trainer.launch(), script))
    assert lines == script.with_suffix(".out").read_text().splitlines()


def test_ray_wraps_nothing_for_one_worker_and_no_sharded_model() -> None:
    installed("ray")
    import torch
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    from gradlane.integrations.ray import prepare_model

    model, prepared = torch.nn.Linear(2, 2), []
    TorchTrainer(lambda: prepared.append(prepare_model(model)), scaling_config=ScalingConfig(num_workers=0)).fit()
    assert prepared == [model]
    with pytest.raises(UnsupportedError, match=r"got parallel_strategy='fsdp', expected 'ddp' or None"):
        prepare_model(model, parallel_strategy="fsdp")
