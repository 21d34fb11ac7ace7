"""A loop with Ray Train, which starts the ranks itself: `SCRIPT FOLDER ARM/CASE...` is its driver.

For the arm `launch` a hook of Ray puts gradlane's class in the place of torch's when a worker begins.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.live.scripts.trainers.job import BATCH, OPTIONS, STEPS, Examples, net, record


def prepare_model(arm: str) -> Any:
    if arm == "integration":
        from gradlane.integrations.ray import prepare_model

        return prepare_model(net(), options=OPTIONS)
    return ray.train.torch.prepare_model(net())


def saved_and_loaded(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, arm: str) -> Any:
    """Report a checkpoint, and begin again with the one that Ray hands out."""
    # Ray puts the files of all ranks into one folder
    name = f"rank{ray.train.get_context().get_world_rank()}"
    (folder / name).mkdir(parents=True)
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, folder / name / f"{name}.pt")
    ray.train.report({}, checkpoint=Checkpoint.from_directory(folder / name))
    model = prepare_model(arm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ray.train.get_checkpoint().as_directory() as reported:
        state = torch.load(Path(reported) / f"{name}.pt")
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return model, optimizer


def train(arm: str, case: str, folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    passes = 2 if case == "accumulation" else 1
    data = ray.train.torch.prepare_data_loader(DataLoader(Examples(STEPS * passes), batch_size=BATCH))
    model = prepare_model(arm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for at, batch in enumerate(data):
        if case == "resuming" and at == STEPS // 2 + 2:
            model, optimizer = saved_and_loaded(folder, model, optimizer, arm)
        summed = at % passes == passes - 1
        with contextlib.nullcontext() if summed else model.no_sync():
            F.cross_entropy(model(batch["x"]), batch["labels"]).backward()
        if summed:
            if case == "clipping":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return model.module, optimizer


if __name__ == "__main__":
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    hook = {"worker_process_setup_hook": "gradlane.replace_ddp"} if names[0].startswith("launch/") else {}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=hook)
    ray.train.torch.TorchTrainer(
        lambda: record(train, folder, names),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    ).fit()
