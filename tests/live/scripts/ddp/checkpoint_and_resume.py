"""Trains, saves a checkpoint on rank 0, and goes on from it with a new model and optimizer."""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from checksum import summary
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def build():
    net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    model = DDP(net)
    return model, torch.optim.Adam(model.parameters(), lr=2e-3)


def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)
    dist.barrier()


def load(path, model, optimizer):
    checkpoint = torch.load(path, map_location="cpu")
    model.module.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["step"]


def train(model, optimizer, start, end):
    losses = []
    for step in range(start, end):
        random = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        inputs = torch.randn(24, 16, generator=random)
        targets = inputs[:, :4].abs()
        optimizer.zero_grad()
        loss = nn.functional.smooth_l1_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10, help="before the checkpoint, and after it")
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folder)
    path = args.checkpoint or Path(folder[0], "checkpoint.pt")

    model, optimizer = build()
    losses = train(model, optimizer, 0, args.steps)
    save(path, model, optimizer, args.steps)

    torch.manual_seed(1)  # another initialisation, which the checkpoint replaces
    model, optimizer = build()
    start = load(path, model, optimizer)
    losses += train(model, optimizer, start, start + args.steps)
    if dist.get_rank() == 0:
        print(summary([model], [optimizer], losses))
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # not in main(): freed after the group, DDP's reducer waits for Gloo with the GIL
