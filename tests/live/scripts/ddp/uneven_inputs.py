"""Ranks with different numbers of batches: join() lets the shorter ones take part until all have ended."""

import argparse

import torch
import torch.distributed as dist
from checksum import summary
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def batches(rank, count, size):
    random = torch.Generator().manual_seed(rank)
    for _ in range(count):
        inputs = torch.randn(size, 12, generator=random)
        yield inputs, inputs.pow(2).sum(1, keepdim=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=8, help="of rank 0; each next rank has two more")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    losses = []
    for _ in range(args.epochs):
        with model.join():
            for inputs, targets in batches(rank, args.batches + 2 * rank, size=16):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())

    if rank == 0:
        print(summary([model], [optimizer], losses))
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # not in main(): freed after the group, DDP's reducer waits for Gloo with the GIL
