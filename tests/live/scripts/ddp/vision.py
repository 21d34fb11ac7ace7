"""A convolutional network with batch normalisation on the digits of scikit-learn."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checksum import summary
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ConvBlock(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(ConvBlock(1, 16), ConvBlock(16, 32), nn.MaxPool2d(2), ConvBlock(32, 32))
        self.classifier = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def digits():
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(found.target))
    return Subset(data, range(384)), Subset(data, range(1536, 1792))


def evaluate(model, loader):
    model.eval()
    correct = torch.zeros(())
    with torch.no_grad():
        for images, labels in loader:
            correct += (model(images).argmax(1) == labels).sum()
    dist.all_reduce(correct)
    model.train()
    return correct.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    training, testing = digits()
    sampler = DistributedSampler(training, shuffle=True, seed=0)
    loader = DataLoader(training, batch_size=args.batch_size, sampler=sampler)
    test_loader = DataLoader(testing, batch_size=64, sampler=DistributedSampler(testing, shuffle=False))
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
        losses.append(evaluate(model, test_loader))
    if dist.get_rank() == 0:
        print(summary([model], [optimizer], losses))
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # not in main(): freed after the group, DDP's reducer waits for Gloo with the GIL
