"""attach beside DDP on loopback, where the network is as good as instant: what is left is what attach costs.

Run by `python -m bench` on two ranks. The step is made longer by the input; the network has 62 tensors and
1.2 M parameters. Each turn is a few steps of one arm, arms in alternating order.
"""

from __future__ import annotations

import itertools
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

import gradlane
from gradlane.core.records.speedup import Speedup

TURNS = 24
STEPS = 6


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(x + self.second_norm(self.second(inner)))


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(64) for _ in range(9)]
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


class Arm:
    def __init__(self, scheduled: bool, batch_size: int, side: int) -> None:
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.call: nn.Module = self.model
        self.session = None
        if scheduled:
            self.session = gradlane.attach(self.model, self.optimizer, "blocks")
        else:
            self.call = nn.parallel.DistributedDataParallel(self.model)
        self.images = torch.randn(batch_size, 1, side, side)
        self.labels = torch.randint(10, (batch_size,))

    def steps(self, count: int) -> list[int]:
        marks = [time.perf_counter_ns()]
        for _ in range(count):
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.call(self.images), self.labels).backward()
            self.optimizer.step()
            marks.append(time.perf_counter_ns())
        return [end - start for start, end in itertools.pairwise(marks[1:])]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    talks = dist.get_rank() == 0
    if talks:
        print("\noverhead on loopback, 2 ranks: torch DDP beside gradlane's blocks")
        print(
            f"{'input':>7} {'DDP ms (p10..p90)':>26} {'gradlane ms (p10..p90)':>26} {'gradlane/DDP':>13} {'pairs p25..p75':>16}"
        )
    for batch_size, side in ((2, 2), (2, 4), (2, 8), (6, 8), (12, 8), (24, 8), (56, 8)):
        arms = [Arm(False, batch_size, side), Arm(True, batch_size, side)]
        for arm in arms:
            arm.steps(8)
        times: list[list[int]] = [[], []]
        turns: list[list[float]] = [[], []]
        for turn in range(TURNS):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                dist.barrier()
                taken = arms[which].steps(STEPS)
                times[which] += taken
                turns[which].append(statistics.median(taken))
        if arms[1].session is not None:
            arms[1].session.close()
        if talks:
            longer = Speedup.of(turns[1], turns[0])
            print(
                f"{f'{batch_size}x{side}x{side}':>7} {_spread(times[0]):>26} {_spread(times[1]):>26} "
                f"{longer.ratio:13.3f} "
                f"{longer.low:8.3f}..{longer.high:.3f}",
                flush=True,
            )
    dist.destroy_process_group()


def _spread(times: list[int]) -> str:
    tenths = statistics.quantiles(times, n=10)
    return f"{statistics.median(times) / 1e6:.1f} ({tenths[0] / 1e6:.1f}..{tenths[-1] / 1e6:.1f})"


if __name__ == "__main__":
    main()
