"""Each rank trains at its own pace, with the update on the servers: one line differs from examples/train.py.

torchrun --nproc-per-node 2 examples/asynchronous.py
gradlane launch --standalone --nproc 2 --backend server --servers 1 examples/asynchronous.py
"""

import torch
import torch.distributed as dist
from torch import nn

import gradlane

dist.init_process_group("gloo")
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
session = gradlane.attach_to_servers(model, optimizer, staleness=None)

rank = dist.get_rank()
data = torch.Generator().manual_seed(rank)
teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
losses = []
for _ in range(100 // (1 + rank)):  # as many as this rank comes to
    images = torch.randn(32, 64, generator=data)
    labels = (images @ teacher).argmax(1)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

session.close()  # all ranks have the same parameters now, and rank 0's optimizer has every rank's updates in it
if rank == 0:
    updates = {int(state["step"]) for state in optimizer.state.values()}
    print(f"updates: {updates}, loss at the end at most half of that at the beginning: {losses[-1] < losses[0] / 2}")

dist.destroy_process_group()
