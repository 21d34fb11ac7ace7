"""Gradients of several micro-batches: all but the last run under no_sync()."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from checksum import summary
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def regression_data(samples=512, features=20):
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, features, generator=random)
    targets = torch.sin(inputs @ torch.randn(features, 3, generator=random))
    return TensorDataset(inputs, targets)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=3)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(42)
    data = regression_data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    net = nn.Sequential(nn.Linear(20, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 3))
    model = DDP(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for index, (inputs, targets) in enumerate(loader):
            # the last batch of an epoch may end a group early
            is_last = (index + 1) % args.accumulate == 0 or index + 1 == len(loader)
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = nn.functional.mse_loss(model(inputs), targets) / args.accumulate
                loss.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())

    if dist.get_rank() == 0:
        print(summary([model], [optimizer], losses[::4]))
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # not in main(): freed after the group, DDP's reducer waits for Gloo with the GIL
