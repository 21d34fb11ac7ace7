"""A script that starts its ranks itself, and has taken torch's DistributedDataParallel by its name."""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Wrapped


def prepare() -> str:
    """A name that the launcher uses too."""
    return "prepared"


def train(local: int, given: argparse.Namespace) -> None:
    assert prepare() == "prepared"
    if given.by == "variables":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(given.port))
        dist.init_process_group("gloo", rank=local, world_size=2)
    else:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{given.port}", rank=local, world_size=2)
    torch.manual_seed(7)
    model = Wrapped(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(local)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
    if local == 0:
        values = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
        scheduled = getattr(model, "session", None) is not None
        print(f"scheduled {scheduled} sha256 {hashlib.sha256(values).hexdigest()}")
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--by", choices=["address", "variables"])
    parser.add_argument("--start", choices=["spawn", "fork"])
    given = parser.parse_args()
    if given.start == "spawn":
        torch.multiprocessing.spawn(train, nprocs=2, args=(given,))
    else:
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=train, args=(local, given)) for local in range(2)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
            assert each.exitcode == 0
