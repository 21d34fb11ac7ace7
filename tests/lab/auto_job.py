"""Run by each rank of a lab: train under auto until it has looked twice; rank 0 leaves its record in the file argv[1]."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

import gradlane
from gradlane import lab
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec

MS = 10**6
LAYERS = 12
PROFILE = Profile(
    "small",
    "device",
    tuple(
        TensorProfile(TensorSpec(f"layer{LAYERS - 1 - n}.weight", 400_000), 3 * (n + 1) * MS, LAYERS - 1 - n)
        for n in range(LAYERS)
    ),
    tuple(Layer(f"layer{n}", 2 * MS) for n in range(LAYERS)),
    36 * MS,
)

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = lab.emulated(PROFILE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
with gradlane.attach(model, optimizer, "auto") as session:
    looks, before = 0, True
    while looks < 2:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        looks += before and not session.tuning
        before = session.tuning
    if session.auto is not None:
        Path(sys.argv[1]).write_bytes(msgspec.json.encode(session.auto))
dist.destroy_process_group()
