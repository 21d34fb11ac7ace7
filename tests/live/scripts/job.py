"""A rank of a job: `job.py STEPS FAULT CULPRIT BACKEND`. At step 5 (or before it attaches) it says so, and the culprit does
what FAULT says; with "catch" the others catch their error and end in a way of their own, with "leave-exit" without a word."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradlane
from gradlane.core.network import Network
from gradlane.errors import JobError
from gradlane.live.startup import attach

FAULT_AT = 5


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(150, 150) for _ in range(6)))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self):
            if self.fails and index == 3:
                raise ValueError("a bad image in shard 17")
            x = torch.tanh(layer(x))
        return x


def no_session(*_: Any, **__: Any) -> None:
    raise ValueError("no session")


def main(steps: int, fault: str, culprit: int, backend: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if fault == "raise-in-attach":
        print("here", flush=True)
        if rank == culprit:
            attach.Session = no_session  # type: ignore[assignment,misc]
    session = gradlane.attach(
        model,
        optimizer,
        gradlane.policies.get("bytescheduler", partition_bytes=40_000, credit_bytes=80_000),
        network=Network.line(dist.get_world_size(), 20_000, 10**9),
        backend=backend,
        profile_iterations=1,
        timeout=120,
    )
    with session if fault == "raise-in-with" else contextlib.nullcontext():
        for step in range(steps):
            if step == FAULT_AT:
                print("here", flush=True)
                if rank == culprit and fault.startswith("leave"):
                    return
                if fault.startswith("raise"):
                    dist.barrier()  # or a rank that is ahead fails before the others have said so
                    model.fails = rank == culprit
            optimizer.zero_grad()
            model(torch.ones(4, 150)).sum().backward()
            optimizer.step()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
    except JobError as error:
        if sys.argv[2] not in ("catch", "leave-exit"):
            raise
        print(error, file=sys.stderr, flush=True)
        if sys.argv[2] == "leave-exit":
            os._exit(7)
        sys.exit(7)
