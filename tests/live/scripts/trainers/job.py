"""What the scripts of all trainers have in common: a model, its data, and a record of how each case ended."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import gradlane
from tests.live.loops.job import GIVEN, log_lines
from tests.live.networks import counting_deferred_updates, slow_network

STEPS, BATCH = 12, 8
OPTIONS = {"policy": gradlane.policies.get("bytescheduler", partition_bytes=2000, credit_bytes=8000), "network": GIVEN}
"""Of the arm `integration`."""


class Net(nn.Module):
    """Twelve parameters, and buffers that differ from rank to rank unless they are broadcast."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 64, 64, 64, 64)
        layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
        self.body = nn.Sequential(*layers, nn.BatchNorm1d(64), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.body(x)
        return logits if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def net() -> Net:
    torch.manual_seed(5)
    return Net()


class Examples(Dataset):
    """`count` batches for each of two ranks."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count * BATCH * 2, 16, generator=generator)
        self.labels = (self.x @ torch.randn(16, 4, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of parameters, buffers and the optimizer's state, bit for bit."""
    found = hashlib.sha256()
    state = optimizer.state_dict()["state"]
    tensors = [*model.state_dict().values(), *(state[index][name] for index in sorted(state) for name in sorted(state[index]))]
    for tensor in tensors:
        found.update(torch.as_tensor(tensor).detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


Train = Callable[[str, str, Path], tuple[nn.Module, torch.optim.Optimizer]]
"""Called with arm, case and a folder for checkpoints; returns the model and the optimizer as they are in the end."""


def record(train: Train, folder: Path, names: Sequence[str]) -> None:
    """Run the cases `names`, each `ARM/CASE`, and leave what became of them in `folder`, in a file of this rank."""
    torch.set_num_threads(1)
    outcomes = {}
    for name in names:
        arm, case = name.split("/")
        with slow_network(), counting_deferred_updates() as deferred, log_lines() as lines:
            model, optimizer = train(arm, case, folder / arm / case)
            # a digest reads the optimizer, and so makes the updates of the last step
            outcomes[name] = {"digest": digest(model, optimizer), "deferred": sum(deferred), "lines": lines}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(outcomes))


def main(train: Train) -> None:
    """Of a script that each rank runs: `SCRIPT FOLDER ARM/CASE...`."""
    record(train, Path(sys.argv[1]), sys.argv[2:])
