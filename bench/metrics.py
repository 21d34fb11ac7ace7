"""What `session.metrics()` costs: two ranks on loopback, a model of 240 tensors, a message for each.

    python -m bench.metrics

Counting is what a session does in each step whether it is asked or not. The first call after a plan came into force
computes the bound, and is told apart.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

from gradlane.compare.processes import run_on_loopback

STEPS = 25
LAYERS = 120


def _rank() -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    import gradlane

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session: Any = gradlane.attach(model, optimizer, "wfbp")
    count = session._parts.meter.begin
    took: dict[str, list[float]] = {"counting": [], "metrics() after a step": [], "metrics() again": []}
    settled = [False]

    def timed(name: str, call: Any) -> None:
        began = time.perf_counter_ns()
        call()
        took[name].append((time.perf_counter_ns() - began) / 1e3)

    session._parts.meter.begin = lambda: timed("counting", count)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        settled.append(session.settled)
        timed("metrics() after a step", session.metrics)
        timed("metrics() again", session.metrics)
    if dist.get_rank() == 0:
        bound_us = took["metrics() after a step"].pop(settled.index(True) - 1)
        for name, times in took.items():
            print(f"{name}: {median(times):.0f} us, the median of {len(times)}; the longest {max(times):.0f} us")
        print(f"the call that computed the bound: {bound_us / 1e3:.1f} ms")
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        _rank()
    else:
        sys.exit(run_on_loopback(["-m", "bench.metrics", "rank"], 2))
