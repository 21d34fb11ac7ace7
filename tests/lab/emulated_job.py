"""Run by each rank of a lab: train an emulated model, the zoo's argv[1], under argv[2]: ddp or a policy, for argv[3] steps.

With servers in the lab they carry the messages. Rank 0 prints one JSON object: the model, the median step in ms, what the
profile computes in ms, and the sum of all parameters, which tells whether gradients were summed right.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import gradlane
from gradlane import lab, zoo
from gradlane.core.network import Network

torch.set_num_threads(1)
dist.init_process_group("gloo")
profile = zoo.profile(sys.argv[1])
model = lab.emulated(profile)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
call: nn.Module = model
session = None
servers = int(os.environ["GRADLANE_LAB_SERVERS"])
if sys.argv[2] == "ddp":
    call = nn.parallel.DistributedDataParallel(model)
else:
    # what is planned for is stated rather than measured, which would take some seconds
    network = Network.line(dist.get_world_size(), 200_000, int(os.environ["GRADLANE_LAB_LINK"]) // 8)
    carrier = {"backend": "server", "servers": servers} if servers else {}
    session = gradlane.attach(model, optimizer, sys.argv[2], network=network, **carrier)
marks = []
for _ in range(int(sys.argv[3])):
    optimizer.zero_grad()
    call().backward()
    optimizer.step()
    marks.append(time.monotonic_ns())
if session is not None:
    session.close()
steps = [after - before for before, after in itertools.pairwise(marks)]
total = sum(float(param.detach().double().sum()) for param in model.parameters())
if dist.get_rank() == 0:
    step_ms = statistics.median(steps[len(steps) // 2 :]) / 1e6
    print(json.dumps({"model": repr(model), "step_ms": step_ms, "compute_ms": profile.compute_ns / 1e6, "total": total}))
dist.destroy_process_group()
