"""A rank that trains until the job fails: `endless.py POLICY BACKEND`.

Each rank's gradients are its number plus one everywhere, so that every parameter is known after each step. When the job has
failed, a tensor that is not what some whole number of steps makes of it is printed as wrong, and so are tensors of different
steps, unless those of the earlier one refuse to be read.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import gradlane
from gradlane.errors import JobError
from gradlane.live.startup import attach
from tests.live.scripts.phases import Call, put

LAYERS, WIDTH = 25, 512  # 25 MiB of gradients
RATE = 2.0**-20  # so that sums and updates are exact


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, factor: float) -> torch.Tensor:
        return torch.stack([layer.sum() for layer in self.layers]).sum() * factor


def main(policy: str, backend: str) -> None:
    torch.set_num_threads(1)
    # before that, nobody can know that a rank is gone, and it is missed after `timeout`
    put(Call(attach, "meet", after=True), lambda: print("has met the others", flush=True))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    carrier = {} if backend == "both" else {"backend": backend}
    a_step = RATE * sum(range(1, world + 1)) / world
    steps = 0
    try:
        with gradlane.attach(model, optimizer, policy, **carrier):
            while True:
                optimizer.zero_grad()
                model(rank + 1.0).backward()
                optimizer.step()
                steps += 1
    except JobError:
        counts = set()
        for index, layer in enumerate(model.layers):
            try:
                low, high = layer.aminmax()
            except JobError:
                continue  # its update was deferred
            made = -float(low) / a_step
            counts.add(made)
            if low != high or not made.is_integer() or not steps - 1 <= made <= steps + 1:
                print(f"wrong: tensor {index} is from {low} to {high} after {steps} steps", flush=True)
        if len(counts) > 1:
            print(f"wrong: tensors are of {sorted(counts)} steps", flush=True)
        raise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
