"""Mixed precision: autocast to bfloat16, parameters and optimizer in float32."""

import argparse

import torch
import torch.distributed as dist
from checksum import summary
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 2 * width)
        self.contract = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.contract(torch.relu(self.expand(self.norm(x))))


def build_model(width=64, depth=4):
    return nn.Sequential(nn.Linear(32, width), *(Residual(width) for _ in range(depth)), nn.Linear(width, 10))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--no-amp", dest="amp", action="store_false")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    teacher = torch.randn(32, 10)
    model = DDP(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    torch.manual_seed(1 + rank)

    losses = []
    for _ in range(args.steps):
        inputs = torch.randn(args.batch_size, 32)
        labels = (inputs @ teacher).argmax(1)
        optimizer.zero_grad()
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16, enabled=args.amp):
            loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    if rank == 0:
        print(summary([model], [optimizer], losses))
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # not in main(): freed after the group, DDP's reducer waits for Gloo with the GIL
