"""Residual blocks that are compiled one by one, inside a model that is not."""

import argparse

import torch
import torch.distributed as dist
from checksum import summary
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x):
        return x + self.second(nn.functional.silu(self.first(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=32, depth=2):
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--compiler", default="aot_eager")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Model()
    for block in net.blocks:
        block.compile(backend=args.compiler)
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(dist.get_rank())

    losses = []
    for _ in range(args.steps):
        inputs = torch.randn(16, 8, generator=random)
        labels = (inputs.sum(1) > 0).long()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    if dist.get_rank() == 0:
        print(summary([model], [optimizer], losses))
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # not in main(): freed after the group, DDP's reducer waits for Gloo with the GIL
