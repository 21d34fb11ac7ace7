"""What `clip_grad_norm_` costs in a session, beside DDP, in turns.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m bench.clip_norm

Small layers, where calls cost. The ranks meet between backward pass and clipping, so that sums have arrived in the arm of
mg-wfbp, which keeps the barrier here. Under `owners` only the first phases have, and its time has the exchange of the norms.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane
from bench.versions import ratio, spread
from gradlane.core.network import Network

WARM, COUNTED, WIDTH, LAYERS = 20, 60, 64, (50, 150, 300)
POLICIES = ("mg-wfbp", "owners")
NETWORK = Network.line(2, startup_ns=100_000, bytes_per_second=1_000_000_000)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for layers in LAYERS:
        steps = {"ddp": _ddp(layers), **{policy: _attached(layers, policy) for policy in POLICIES}}
        times: dict[str, list[float]] = {arm: [] for arm in steps}
        for step in range(WARM + COUNTED):
            for arm, clip in steps.items():
                took_ms = clip()
                if step >= WARM:
                    times[arm].append(took_ms)
        if dist.get_rank() == 0:
            print(f"{2 * layers} tensors: ddp {spread(times['ddp'])} ms")
            for arm in POLICIES:
                print(f"  {arm} {spread(times[arm])} ms, of DDP's {ratio(times[arm], times['ddp'])}", flush=True)
    dist.destroy_process_group()


def _model(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _ddp(layers: int) -> Callable[[], float]:
    model, optimizer = _model(layers)
    return partial(_step, DistributedDataParallel(model), optimizer)


def _attached(layers: int, policy: str) -> Callable[[], float]:
    model, optimizer = _model(layers)
    gradlane.attach(model, optimizer, policy, network=NETWORK, backend="all-reduce")
    return partial(_step, model, optimizer)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Train a step; the ms of its clipping."""
    optimizer.zero_grad()
    model(torch.randn(8, WIDTH)).square().mean().backward()
    dist.barrier()
    began = time.perf_counter()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    took_ms = (time.perf_counter() - began) * 1e3
    optimizer.step()
    return took_ms


if __name__ == "__main__":
    main()
