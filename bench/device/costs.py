"""What a tensor and a message cost on a device, beside what DDP takes for the same: `python -m bench.device.costs CONFIG.json`.

As `bench.parts` on the CPU: many small layers, and arms with one message for all tensors and with one for each, in turns in
one process on each rank. A step ends when the device has done all of it.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

import gradlane
from bench.device.lines import Lines
from gradlane.core.network import Network
from tests.device.deadline import Deadline

LAYERS, WIDTH = 200, 32


class Config(msgspec.Struct, frozen=True):
    """What the parent asks for. group: of torch.distributed; carriers: backends of gradlane to measure."""

    out: str
    group: str
    carriers: tuple[str, ...]
    turns: int
    limit_s: float
    dry: bool


def _step_of(policy: str, carrier: Any, device: torch.device) -> Callable[[], None]:
    """A step under a policy of gradlane, or "plain", "ddp" or "ddp, a bucket a tensor" of torch."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).to(device)
    x = torch.randn(2, WIDTH, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if policy == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif policy == "ddp, a bucket a tensor":
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-6)
    elif policy != "plain":
        network = Network.line(dist.get_world_size(), 10_000, 10**9)
        known = {"backend": carrier, "network": network, "cross_barrier": False, "profile_iterations": 2}
        gradlane.attach(model, optimizer, policy, **known)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


def _measure(config: Config, lines: Lines) -> None:
    warnings.simplefilter("ignore")
    deadline = Deadline(config.limit_s)
    if config.dry:
        torch.set_num_threads(1)
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(config.group)
    arms: dict[str, Callable[[], None]] = {}
    for policy in ("plain", "ddp", "ddp, a bucket a tensor"):
        arms[policy] = _step_of(policy, None, device)
    for carrier in config.carriers:
        for policy in ("sync-easgd", "wfbp"):
            arms[f"{policy}@{carrier}"] = _step_of(policy, carrier, device)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for step in arms.values():
        for _ in range(10):
            step()
    for _ in range(config.turns):
        on = torch.tensor(float(deadline.left_s > 0), device=device)
        dist.all_reduce(on, op=dist.ReduceOp.MIN)
        if not float(on):
            lines.add("left out", part="costs", group=config.group, reason="time was up before the last turn")
            break
        for name, step in arms.items():
            began = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - began)
    us = {name: statistics.median(taken) * 1e6 for name, taken in times.items() if taken}
    if len(us) < len(arms):
        return
    for carrier in config.carriers:
        merged, single = us[f"sync-easgd@{carrier}"], us[f"wfbp@{carrier}"]
        lines.add(
            "cost",
            group=config.group,
            ranks=dist.get_world_size(),
            carrier=carrier,
            tensors=LAYERS,
            turns=len(times["plain"]),
            ddp_tensor_us=(us["ddp"] - us["plain"]) / LAYERS,
            tensor_us=(merged - us["plain"]) / LAYERS,
            ddp_message_us=(us["ddp, a bucket a tensor"] - us["ddp"]) / LAYERS,
            message_us=(single - merged) / LAYERS,
            step_ms={name: value / 1e3 for name, value in us.items()},
        )


def main() -> None:
    """Ends the process at once: sessions of arms are left as they are."""
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Config)
    lines = Lines(Path(config.out) if os.environ["RANK"] == "0" else None)
    code = 0
    try:
        _measure(config, lines)
    except Exception:
        lines.add("error", part=f"costs over {config.group}", text=traceback.format_exc(limit=-6))
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
