"""What the parts of a step cost, on one rank without a network, in microseconds each, beside what DDP takes for the same.

Run by `python -m bench`. All arms take turns in one process: torch alone, DDP, DDP with a bucket for each tensor, and
gradlane with one message for all tensors and with one for each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import gradlane
from gradlane import policies
from gradlane.core.backends import BackendName
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.live.session.deferred_step import DeferredStep
from gradlane.planning.plans import make_plan
from gradlane.schedule import NativeDispatcher

LAYERS = 200
TURNS = 40
BACKENDS: tuple[BackendName, ...] = ("all-reduce", "server")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(LAYERS)])


def trained(policy: str, backend: BackendName = "all-reduce") -> Callable[[], None]:
    """A training step of many small layers, which waits for all sums.

    policy: of gradlane; or "plain", "ddp", or "ddp, a bucket a tensor" for torch alone.
    """
    model: nn.Module = network()
    x = torch.randn(2, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if policy == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif policy == "ddp, a bucket a tensor":
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-6)
    elif policy != "plain":
        cluster = Network.line(1, 10_000, 10**9)
        gradlane.attach(model, optimizer, policy, backend=backend, network=cluster, cross_barrier=False)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    for _ in range(8):
        step()
    return step


def interleaved(*calls: Callable[[], None]) -> list[float]:
    """Median seconds of each call, taken in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(TURNS):
        for call, taken in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
    return [statistics.median(taken) for taken in times]


def dispatcher() -> Callable[[], None]:
    tensors = tuple(TensorProfile(TensorSpec(f"t{i}", 1024), i, LAYERS - 1 - i) for i in range(LAYERS))
    profile = Profile("bench", "none", tensors, tuple(Layer(f"l{i}", 1) for i in range(LAYERS)), LAYERS)
    network = Network.line(1, 0, 10**9)
    plan = make_plan(policies.get("bytescheduler"), profile, Place(network))
    core = NativeDispatcher(plan)

    def iteration() -> None:
        core.begin()
        for tensor in range(LAYERS):
            for message in core.ready(tensor):
                core.finished(message)

    return iteration


def updates() -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    model = network()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.0, momentum=0.9)
    for param in params:
        param.grad = torch.ones_like(param)

    def one_by_one() -> None:
        owed = DeferredStep(optimizer)
        for param in params:
            owed.update([param])

    def together() -> None:
        DeferredStep(optimizer).update(params)

    return optimizer.step, one_by_one, together


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain, ddp, ddp_single, *gradlanes = interleaved(
        trained("plain"), trained("ddp"), trained("ddp, a bucket a tensor"),
        *(trained(policy, backend) for backend in BACKENDS for policy in ("sync-easgd", "wfbp")),
    )  # fmt: skip
    (core,) = interleaved(dispatcher())
    step, one_by_one, together = interleaved(*updates())
    each = 1e6 / LAYERS
    print(f"\nparts, one rank, {LAYERS} tensors of 1 KiB: microseconds each, beside what DDP takes for the same")
    print(f"{'what':>46} {'DDP':>7} {'gradlane':>9} {'more':>6}")

    def row(what: str, own: float, ours: float) -> None:
        print(f"{what:>46} {own * each:7.1f} {ours * each:9.1f} {(ours - own) * each:6.1f}", flush=True)

    for backend, merged, single in zip(BACKENDS, gradlanes[::2], gradlanes[1::2], strict=True):
        row(f"a tensor, over {backend}", ddp - plain, merged - plain)
        row(f"a message, over {backend}", ddp_single - ddp, single - merged)
    row("an update that is deferred, alone", step, one_by_one)
    row("an update that is deferred, with the others", step, together)
    print(f"  (the Dispatcher: {core * each:.1f} a message)", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
