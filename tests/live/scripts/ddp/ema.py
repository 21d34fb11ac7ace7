"""An exponential moving average of the model beside it, which is what gets evaluated."""

import argparse

import torch
import torch.distributed as dist
from checksum import summary
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def build_model():
    return nn.Sequential(
        nn.Conv1d(1, 16, 5, padding=2),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Conv1d(16, 16, 5, padding=2),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 32, 3),
    )


def waves(random, count):
    """Sines of three frequencies, with noise."""
    labels = torch.randint(3, (count,), generator=random)
    time = torch.arange(32) / 32
    clean = torch.sin(6.28 * time * (labels.unsqueeze(1) + 1))
    return (clean + 0.3 * torch.randn(count, 32, generator=random)).unsqueeze(1), labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--ema-decay", type=float, default=0.9)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(build_model())
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(args.ema_decay), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    random = torch.Generator().manual_seed(10 + rank)

    losses = []
    for _ in range(args.steps):
        inputs, labels = waves(random, args.batch_size)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model.module)
        losses.append(loss.item())

    ema.eval()
    with torch.no_grad():
        inputs, labels = waves(random, 64)
        losses.append(nn.functional.cross_entropy(ema(inputs), labels).item())
    if rank == 0:
        print(summary([model, ema], [optimizer], losses))
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # not in main(): freed after the group, DDP's reducer waits for Gloo with the GIL
