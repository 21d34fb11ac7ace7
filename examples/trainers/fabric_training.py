"""A loop with Lightning Fabric, as it is without gradlane.

gradlane launch --ddp --nproc 2 examples/trainers/fabric_training.py
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
images = torch.randn(41 * 64, 64)
labels = (images @ torch.randn(64, 10)).argmax(1)
model, optimizer = fabric.setup(model, optimizer)
data = fabric.setup_dataloaders(DataLoader(TensorDataset(images, labels), batch_size=32))

for step, (images, labels) in enumerate(data):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    fabric.backward(loss)
    optimizer.step()
    if step % 20 == 0:
        fabric.print(f"step {step}: loss {loss.item():.3f}")
