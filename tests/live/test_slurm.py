"""`srun gradlane launch`: each task of a Slurm step is a rank, without torchrun. The tasks' variables are set here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.commands import command_line
from tests.ports import free_port

SCRIPT = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
sum = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(sum)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
print(type(model).__module__, dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"], sum.item())
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
