"""What `check_finite` costs: the time within the check, as a part of the step.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m bench.finite

Two models: many small layers, where calls cost, and few large ones, where bytes do. The check's own calls are timed, since a
difference between two arms would be less than a shared machine's noise.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradlane
from gradlane.core.network import Network
from gradlane.live.session.finite import FiniteCheck

WARM, COUNTED = 10, 40
NETWORK = Network.line(2, startup_ns=100_000, bytes_per_second=1_000_000_000)
MODELS = {"80 layers of 64 x 64": (80, 64, 32), "6 layers of 1024 x 1024": (6, 1024, 256)}


class Timed:
    """Calls of a method, with the time that they took, in s."""

    def __init__(self, kind: type, name: str) -> None:
        self.seconds, self._method = 0.0, getattr(kind, name)
        setattr(kind, name, lambda *given: self._call(*given))

    def _call(self, *given: Any) -> None:
        began = time.perf_counter()
        self._method(*given)
        self.seconds += time.perf_counter() - began


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    within = [Timed(FiniteCheck, "contributes"), Timed(FiniteCheck, "updates")]
    for what, (layers, width, batch) in MODELS.items():
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        steps, checks = [], []
        with gradlane.attach(model, optimizer, "blocks", network=NETWORK, check_finite=True):
            for step in range(WARM + COUNTED):
                before, began = sum(each.seconds for each in within), time.perf_counter()
                optimizer.zero_grad()
                model(torch.randn(batch, width)).square().mean().backward()
                optimizer.step()
                if step >= WARM:
                    steps.append(time.perf_counter() - began)
                    checks.append(sum(each.seconds for each in within) - before)
        if dist.get_rank() == 0:
            size = sum(param.numel() for param in model.parameters()) * 4 / 1e6
            took, of = median(checks), median(steps)
            print(f"{what}, {size:.1f} MB: {took * 1e6:.0f} us of a step of {of * 1e3:.1f} ms, {took / of:.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
