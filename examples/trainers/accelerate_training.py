"""A loop with accelerate, as it is without gradlane.

gradlane launch --ddp --nproc 2 examples/trainers/accelerate_training.py
"""

import accelerate
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = accelerate.Accelerator(cpu=True)
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
images = torch.randn(41 * 64, 64)
labels = (images @ torch.randn(64, 10)).argmax(1)
data = DataLoader(TensorDataset(images, labels), batch_size=32)
model, optimizer, data = accelerator.prepare(model, optimizer, data)

for step, (images, labels) in enumerate(data):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    accelerator.backward(loss)
    optimizer.step()
    if step % 20 == 0:
        accelerator.print(f"step {step}: loss {loss.item():.3f}")

accelerator.end_training()
