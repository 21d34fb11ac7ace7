"""A script under torch's DistributedDataParallel, for tests/live/test_advise.py.

    watched.py STEPS [holds on]

It loads its data in processes of its own, scales its loss, clips gradients, evaluates now and then, and is slow to go
where it is told to hold on: it catches whatever ends it.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def train(steps: int) -> None:
    data = DataLoader(TensorDataset(torch.randn(8 * steps, 64), torch.randint(4, (8 * steps,))), batch_size=8, num_workers=1)
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step, (x, labels) in enumerate(data):
        if step % 3 == 0:
            with model.no_sync():
                scaler.scale(nn.functional.cross_entropy(model(x), labels)).backward()
        scaler.scale(nn.functional.cross_entropy(model(x), labels)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        try:
            scaler.step(optimizer)
        except BaseException:
            if "holds" not in sys.argv:
                raise
        scaler.update()
        optimizer.zero_grad()
        if step % 5 == 0:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()


dist.init_process_group("gloo")
torch.set_num_threads(1)
train(int(sys.argv[1]))
dist.destroy_process_group()
