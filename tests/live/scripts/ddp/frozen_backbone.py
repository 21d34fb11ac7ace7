"""Fine-tuning: a frozen backbone in evaluation mode, a head that is trained."""

import argparse

import torch
import torch.distributed as dist
from checksum import summary
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 5))

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        return self.head(self.backbone(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Classifier()
    net.backbone.requires_grad_(False)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    data = TensorDataset(torch.randn(256, 3, 16, 16), torch.randint(5, (256,)))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    torch.manual_seed(rank)  # for dropout

    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    if rank == 0:
        print(summary([model], [optimizer], losses))
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # not in main(): freed after the group, DDP's reducer waits for Gloo with the GIL
