"""Policies over servers that update, with and without a bound on staleness, in turns (ByteScheduler §6.1).

    gradlane lab --hosts 2 --link 50mbit -- python -m bench.asynchronous [MODEL] [SCALE]

Each rank trains an emulated model of the zoo, with its bytes times SCALE. A turn attaches the model, trains, and closes. Rank
0 prints milliseconds a step of each policy, and that of `wfbp` over it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

import gradlane
from bench.versions import ratio, spread
from gradlane import policies, zoo
from gradlane.emulation.model import Emulated

TURNS, WARM, COUNTED = 6, 2, 8
DEFAULT = "wfbp"


def main() -> None:
    model, scale = (sys.argv[1:] + ["mobilenet", "0.1"][len(sys.argv) - 1 :])[:2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    profile = zoo.profile(model, batch=64)
    sizes = {"partition_bytes": round(2**20 * float(scale)), "credit_bytes": round(2**22 * float(scale))}
    arms = {
        DEFAULT: policies.get(DEFAULT),
        "mercury": policies.get("mercury"),
        "bytescheduler": policies.get("bytescheduler", **sizes),
        "bytescheduler, pulls by arrival": policies.get("bytescheduler", pulls="arrival", **sizes),
    }
    for staleness in (0, None):
        times: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(TURNS):
            for arm, policy in arms.items():
                emulated = Emulated(profile, scale=float(scale))
                optimizer = torch.optim.SGD(emulated.parameters(), lr=1e-3)
                with gradlane.attach_to_servers(emulated, optimizer, policy=policy, staleness=staleness):
                    times[arm] += _steps(emulated, optimizer)
        if dist.get_rank() == 0:
            print(f"{model}, staleness {staleness}: alone {profile.compute_ns / 1e6:.0f} ms")
            for arm, of_arm in times.items():
                print(f"  {arm}: {spread(of_arm)} ms, {DEFAULT}'s over it {ratio(times[DEFAULT], of_arm)}", flush=True)
    dist.destroy_process_group()


def _steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[float]:
    """The ms of each counted step, from start to start."""
    began = time.perf_counter()
    for step in range(WARM + COUNTED):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        if step >= WARM:
            yield (time.perf_counter() - began) * 1e3
        began = time.perf_counter()


if __name__ == "__main__":
    main()
