"""A rank that saves after each step and continues from there; rank 0 kills a server in the first attempt.

    gradlane launch ... resumed.py FOLDER UPDATES_ON PROCESS

UPDATES_ON: "ranks" or "servers". PROCESS: number of the server's process; 0 for one that the launcher started.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import gradlane
from tests.live.resuming import KILLED_AT, NETWORK, STEPS, gradients, model_and_optimizer


def server_of_the_launcher() -> int:
    launcher = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
    others = launcher.read_text().split()
    return next(int(other) for other in others if b"\0server\0" in Path(f"/proc/{other}/cmdline").read_bytes())


folder, updates_on, process = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()
model, optimizer = model_and_optimizer()
first = 0
if (folder / "state").exists():
    saved = torch.load(folder / "state")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
dist.barrier()  # nobody saves before all have loaded
if updates_on == "servers":
    session = gradlane.attach_to_servers(model, optimizer)
else:
    session = gradlane.attach(model, optimizer, "mercury", network=NETWORK)
for step in range(first, STEPS):
    if step == KILLED_AT and rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(process or server_of_the_launcher(), signal.SIGKILL)
    gradients(model, optimizer, rank, step)
    optimizer.step()
    if updates_on == "servers":
        session.fetch_optimizer_state()
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, folder / "new")
        os.replace(folder / "new", folder / "state")
session.close()
if rank == 0:
    (folder / "attempts").write_text(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.destroy_process_group()
