"""`gradlane launch` in a process that something else has started as a rank: it becomes that rank, without torchrun. Slurm's
variables are set here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import command_line
from tests.ports import free_port

SCRIPT = r"""
import os
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
sum = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(sum)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
said = type(model).__module__, dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"], sum.item()
sys.stdout.write(" ".join(map(str, said)) + "\n")  # at once: ranks may share a pipe
dist.barrier()
dist.destroy_process_group()
"""


def test_tasks_of_slurm_are_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    port = free_port()
    tasks = []
    for rank in range(2):
        variables = {
            "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_PORT": str(port),
        }  # fmt: skip
        command = command_line("launch", "--ddp", tmp_path / "train.py")
        tasks.append(subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True))
    said = [task.communicate(timeout=120)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0]
    assert said == [f"gradlane.live.ddp.wrapper {rank} 2 {rank} 3.0\n" for rank in range(2)]


@pytest.mark.extra
def test_processes_that_torchrun_has_started_are_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    command = [*torchrun, "--no-python", *command_line("launch", "--ddp", tmp_path / "train.py")]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"gradlane.live.ddp.wrapper {rank} 2 {rank} 3.0" for rank in range(2)]


@pytest.mark.parametrize("option", ["--servers", "--await-servers"])
def test_a_rank_of_another_launcher_starts_no_job_of_its_own_for_servers(tmp_path: Path, option: str) -> None:
    """With a rendezvous of its own, each rank would train alone."""
    (tmp_path / "train.py").write_text(SCRIPT)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = command_line("launch", "--ddp", "--backend", "server", option, "1", tmp_path / "train.py")
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "got servers of their own in a rank of another launcher" in done.stderr
