"""What the ranks of test_hierarchy.py do: two hosts with two ranks each, which are processes of one machine.

Which host a rank is on is what it says of itself (`host_sums.be_on`).
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist

import gradlane
from gradlane.core import files
from gradlane.errors import GradlaneError
from gradlane.live.backends.all_reduce import AllReduceBackend
from gradlane.live.backends.process_groups import NewGroups
from gradlane.testing.backends import check_backend
from tests.live.cases import train, under_ddp
from tests.live.models import MODELS, OPTIMIZERS

_made = itertools.count()


def backend(algorithm: Any, weight: int = 1) -> AllReduceBackend:
    name = f"hierarchy{next(_made)}"
    store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return AllReduceBackend(torch.device("cpu"), None, NewGroups(None, store, name), 30.0, weight, algorithm=algorithm)


def check(rank: int, world: int, weight: int, dtype: str) -> None:
    check_backend(backend("hierarchical", weight), dtype=dtype)


def measured(rank: int, world: int, algorithm: Any) -> dict[str, Any]:
    made = backend(algorithm)
    try:
        network = made.measure_sums(budget_s=0.05)
        return {"network": files.dumps(network).decode(), "is_hierarchical": made.is_hierarchical}
    finally:
        made.close(None)


def refused(rank: int, world: int) -> str:
    try:
        backend("hierarchical")
    except GradlaneError as error:
        return str(error)
    return ""


def trained(rank: int, world: int, policy: str) -> tuple[str, float]:
    """A digest of a session's parameters, and by how much they are apart from DDP's, of the largest of each."""
    expected = under_ddp("convolutions", "sgd", 6, rank)
    torch.manual_seed(7)
    net = MODELS["convolutions"]()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    options: dict[str, Any] = {"timeout": 30, "profile_iterations": 3, "backend": "all-reduce", "algorithm": "hierarchical"}
    with gradlane.attach(net, optimizer, policy, **options) as session:
        train(net, net, optimizer, net.batch, 6, rank)
        session.flush()
    found = {name: param.detach() for name, param in net.named_parameters()}  # buffers are rank 0's at the next forward pass
    apart = max(float((each - expected[name]).abs().max() / expected[name].abs().max()) for name, each in found.items())
    return sha256(b"".join(each.numpy().tobytes() for each in found.values())).hexdigest(), apart


def dies(rank: int, world: int, culprit: int) -> tuple[str, int, float]:
    """One rank is killed in the middle of sums; what the others hear, whom it names, and after how long."""
    torch.manual_seed(7)
    net = torch.nn.Linear(2_000, 2_000)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    began = 0.0
    try:
        options: dict[str, Any] = {"timeout": 30, "backend": "all-reduce", "algorithm": "hierarchical"}
        gradlane.attach(net, optimizer, "bytescheduler", **options)
        for step in range(1000):
            began = time.monotonic()
            optimizer.zero_grad()
            net(torch.ones(1, 2_000)).sum().backward()
            if rank == culprit and step == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
    except GradlaneError as error:
        return type(error).__name__, getattr(error, "rank", -1), time.monotonic() - began
    return "", -1, 0.0
