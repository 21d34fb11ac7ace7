"""A loop with Ray Train. gradlane's `prepare_model` stands in the place of Ray's.

python examples/trainers/ray_training.py
"""

import tempfile

import ray.train.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradlane.integrations.ray import prepare_model


def train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    images = torch.randn(41 * 64, 64)
    labels = (images @ torch.randn(64, 10)).argmax(1)
    data = ray.train.torch.prepare_data_loader(DataLoader(TensorDataset(images, labels), batch_size=32))
    model = prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step, (images, labels) in enumerate(data):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % 20 == 0 and ray.train.get_context().get_world_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as results:
        ray.train.torch.TorchTrainer(
            train,
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=results),
        ).fit()
