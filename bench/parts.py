"""What the parts of a step cost, on one rank without a network, in microseconds each.

Run by `python -m bench`. The work of torch itself is measured beside and subtracted; A and B take turns.
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
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.live.session.deferred_step import DeferredStep
from gradlane.planning.plans import make_plan
from gradlane.schedule import NativeDispatcher

LAYERS = 200
TURNS = 40


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(LAYERS)])


def trained(policy: str | None) -> Callable[[], None]:
    """One forward and backward pass of many small layers, with or without gradlane."""
    model = network()
    x = torch.randn(2, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if policy is not None:
        session = gradlane.attach(model, optimizer, policy, network=Network.line(1, 10_000, 10**9))

    def step() -> None:
        model(x).sum().backward()
        if policy is not None:
            session.flush()
        optimizer.zero_grad()

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


def collectives() -> None:
    """As many all-reduces of one rank as there are layers: what torch.distributed takes by itself."""
    data = torch.zeros(256)
    works = [dist.all_reduce(data, async_op=True) for _ in range(LAYERS)]
    for work in works:
        if work is not None:
            work.wait()


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
    plain, merged, single, raw = interleaved(trained(None), trained("sync-easgd"), trained("wfbp"), collectives)
    (core,) = interleaved(dispatcher())
    step, one_by_one, together = interleaved(*updates())
    each = 1e6 / LAYERS
    print(f"\nparts, one rank, {LAYERS} tensors of 1 KiB: microseconds each")
    print(
        f"  {(merged - plain) * each:7.1f}  a tensor: hook, division into its slot, readiness (DDP's reducer: not subtracted)"
    )
    print(f"  {(single - merged) * each:7.1f}  a message: scheduling and torch.distributed's own work")
    print(f"  {raw * each:7.1f}    of which an all_reduce called by hand takes")
    print(f"  {core * each:7.1f}    of which the Dispatcher takes")
    print(f"  {step * each:7.1f}  an update by optimizer.step() as it is")
    print(f"  {one_by_one * each:7.1f}  a deferred update alone")
    print(f"  {together * each:7.1f}  a deferred update together with the others", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
