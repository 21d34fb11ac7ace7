"""Steps of a script with a GradScaler, under two policies beside DDP, in turns.

    gradlane lab --hosts 2 --link 750mbit -- python -m bench.grad_scaler [MODEL]

The model is emulated, BERT-Base if none is named, with tensors of 0.03 times their size: 750 Mbit/s are 25 Gbit/s then. mg-wfbp
keeps the barrier, as every policy does here but `owners`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradlane
from bench.versions import ratio, spread
from gradlane import zoo
from gradlane.core.backends import BackendName
from gradlane.lab import emulated

SCALE, TURNS, STEPS = 0.03, 7, 8
WARM = 2  # turns that are not counted: sessions measure in them
BACKENDS: tuple[BackendName, ...] = ("all-reduce", "server")
ARMS = [(policy, backend) for backend in BACKENDS for policy in ("mg-wfbp", "owners")]


def main(name: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    turns = {"ddp": _turns(name, None)} | {
        f"{policy} over {backend}": _turns(name, (policy, backend)) for policy, backend in ARMS
    }
    times: dict[str, list[float]] = {arm: [] for arm in turns}
    for turn in range(WARM + TURNS):
        for arm, take in turns.items():
            dist.barrier()
            took_ms = take()
            if turn >= WARM:
                times[arm].append(took_ms)
    if dist.get_rank() == 0:
        print(f"{name}: ddp {spread(times['ddp'])} ms a step")
        for arm in list(times)[1:]:
            print(f"  {arm} {spread(times[arm])} ms, of DDP's {ratio(times[arm], times['ddp'])}", flush=True)
    dist.destroy_process_group()


def _turns(name: str, arm: tuple[str, BackendName] | None) -> Callable[[], float]:
    """What trains some steps, and returns the ms that each took in the mean."""
    model = emulated(zoo.profile(name), scale=SCALE, rank=dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    call = DistributedDataParallel(model) if arm is None else model
    session = None if arm is None else gradlane.attach(model, optimizer, arm[0], backend=arm[1])

    def take() -> float:
        began = time.perf_counter()
        for step in range(1 + STEPS):
            if step == 1:
                began = time.perf_counter()
            optimizer.zero_grad()
            scaler.scale(call()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        if session is not None:
            session.flush()
        return (time.perf_counter() - began) * 1e3 / STEPS

    return take


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "bert-base")
