"""Two lines make a training script's gradients scheduled: the two that name gradlane.

torchrun --nproc-per-node 2 examples/train.py
gradlane launch --nproc 2 --policy p3 examples/train.py
"""

import torch
import torch.distributed as dist
from torch import nn

import gradlane

dist.init_process_group("gloo")
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
gradlane.attach(model, optimizer)

data = torch.Generator().manual_seed(dist.get_rank())
teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
for step in range(101):
    images = torch.randn(32, 64, generator=data)
    labels = (images @ teacher).argmax(1)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    if step % 20 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")

dist.destroy_process_group()
