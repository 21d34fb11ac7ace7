"""What each step takes and waits for, to any logger: here a CSV file, and TensorBoard where a folder is named.

gradlane launch --nproc 2 examples/metrics.py
gradlane launch --nproc 2 examples/metrics.py --tensorboard runs/first
"""

import argparse
import csv
import sys

import torch
import torch.distributed as dist
from torch import nn

import gradlane

parser = argparse.ArgumentParser()
parser.add_argument("--tensorboard", metavar="DIR")
parser.add_argument("--drop-in", action="store_true", help="wrap the model instead of attaching to it")
options = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
model: nn.Module = net
if options.drop_in:
    model = gradlane.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
session = None if options.drop_in else gradlane.attach(net, optimizer)

writer = None
if options.tensorboard and dist.get_rank() == 0:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(options.tensorboard)
table = csv.writer(sys.stdout)

for step in range(20):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    if isinstance(model, gradlane.DistributedDataParallel):
        session = model.session  # None in the first step, which torch sums
    if session is None or dist.get_rank() != 0:
        continue
    metrics = session.metrics()
    if step >= 15:
        table.writerow([step, metrics["policy"], metrics["messages"], metrics["step_seconds"], metrics["exposed_seconds"]])
    if writer is not None:
        for name, value in metrics.items():
            if isinstance(value, (int, float)):  # not the names, and not what is unknown yet
                writer.add_scalar(f"gradlane/{name}", value, step)

if writer is not None:
    writer.close()
dist.destroy_process_group()
