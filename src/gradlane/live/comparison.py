"""The worker of `gradlane compare`: one rank that trains the same network under torch DDP and under every
policy, in turns, and leaves what it measured as files for the parent to read.

All arms live side by side and take turns of a few steps, so that a noisy machine disturbs them alike. A
step is timed from its start to the start of the next, so that what a policy leaves for the next forward
pass is counted there; the first step of a turn follows a flush and is not counted.

Run as `python -m gradlane.live.comparison CONFIG` under any torchrun-like launcher.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from gradlane.core import files
from gradlane.live.attachment import attach
from gradlane.live.demo import Digits, DigitsNet
from gradlane.live.probe import sweep
from gradlane.live.session import Session
from gradlane.tune import catalog
from gradlane.tune.fit import fit_network

BASELINE = "torch-ddp"
ALONE = "no-communication"
WARM_UP_STEPS = 6  # counting, measuring, and one step under the final plan


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the parent asks for. batch_size 0: choose it so that computing takes as long as communicating."""

    out: str
    policies: tuple[str, ...]
    rounds: int
    steps: int
    batch_size: int
    timeout_s: float


class ArmOutcome(msgspec.Struct, frozen=True):
    """One arm on one rank. equal_to_ddp: parameters and buffers, bit for bit, after the same steps."""

    step_ns: tuple[int, ...]
    final_loss: float
    equal_to_ddp: bool
    messages: int


class Outcome(msgspec.Struct, frozen=True):
    """What one rank leaves in `rank-N.json`. communicate_ns: all gradients as one all-reduce, by the fit."""

    rank: int
    model: str
    parameter_bytes: int
    batch_size: int
    communicate_ns: int
    network: str
    arms: dict[str, ArmOutcome]


class _Arm:
    """One model with its optimizer, its data and its way of summing gradients."""

    def __init__(self, name: str, config: Config, batch_size: int, network: Any) -> None:
        self.name = name
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = DigitsNet()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        self.data = Digits(rank, world, batch_size)
        self.call: nn.Module = self.model
        self.session: Session | None = None
        if name == BASELINE:
            self.call = nn.parallel.DistributedDataParallel(self.model)
        elif name != ALONE:
            self.session = attach(self.model, self.optimizer, name, network=network, timeout=config.timeout_s)
        self.step_ns: list[int] = []
        self.loss = float("nan")

    def turn(self, steps: int, count: bool) -> None:
        dist.barrier()
        marks = []
        for _ in range(steps + 1):
            marks.append(time.perf_counter_ns())
            images, labels = self.data.batch()
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.call(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        marks.append(time.perf_counter_ns())
        if self.session is not None:
            self.session.flush()
        self.loss = float(loss.detach())
        if count:
            self.step_ns += [end - start for start, end in itertools.pairwise(marks[1:])]

    def bits(self) -> list[torch.Tensor]:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]


def compare(config: Config, say: Callable[[str], None]) -> Outcome:
    """Run all arms and return this rank's outcome; `say` hears of progress on rank 0."""
    rank, world = dist.get_rank(), dist.get_world_size()
    size_bytes = sum(param.numel() * param.element_size() for param in DigitsNet().parameters())
    group = dist.new_group()
    network = fit_network(sweep(group, torch.device("cpu"), budget_s=3.0), workers=world, source="measured by compare")
    communicate_ns = network.cost_ns(size_bytes)
    batch_size = config.batch_size or _batch_size_for(communicate_ns)
    say(f"all-reduce of the {size_bytes / 2**20:.1f} MiB of gradients: {communicate_ns / 1e6:.0f} ms; batch size {batch_size}")
    arms = [_Arm(name, config, batch_size, network) for name in (BASELINE, ALONE, *config.policies)]
    total = (config.rounds + 1) * len(arms)
    for turn in range(config.rounds + 1):
        for place, arm in enumerate(arms):
            began = time.perf_counter()
            arm.turn(WARM_UP_STEPS if turn == 0 else config.steps, count=turn > 0)
            each_ms = (time.perf_counter() - began) / ((WARM_UP_STEPS if turn == 0 else config.steps) + 1) * 1e3
            say(
                f"[{turn * len(arms) + place + 1:3d}/{total}] {'warm-up' if turn == 0 else f'round {turn}'} "
                f"{arm.name:16s} {each_ms:7.1f} ms a step, loss {arm.loss:.3f}"
            )
    reference = arms[0].bits()
    out = Path(config.out)
    outcomes = {}
    for arm in arms:
        equal = all(torch.equal(a, b) for a, b in zip(reference, arm.bits(), strict=True))
        messages = 0
        if arm.session is not None:
            files.write(out / f"timeline-{arm.name}-rank{rank}.json", arm.session.timeline())
            files.write(out / f"plan-{arm.name}-rank{rank}.json", arm.session.plan)
            files.write(out / f"profile-rank{rank}.json", arm.session.profile())
            messages = len(arm.session.plan.messages)
            arm.session.close()
        outcomes[arm.name] = ArmOutcome(tuple(arm.step_ns), arm.loss, equal, messages)
    files.write(out / f"network-rank{rank}.json", network)
    described = f"{type(arms[0].model).__name__} on digits at batch {batch_size}"
    return Outcome(rank, described, size_bytes, batch_size, communicate_ns, network.source, outcomes)


def _batch_size_for(communicate_ns: int) -> int:
    """The batch at which a step without communication takes about `communicate_ns`, agreed upon by all ranks."""
    torch.manual_seed(0)
    model = DigitsNet()
    times = []
    for batch_size in (8, 32):
        data = Digits(dist.get_rank(), dist.get_world_size(), batch_size)
        taken = []
        for _ in range(4):
            dist.barrier()
            began = time.perf_counter_ns()
            images, labels = data.batch()
            nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            taken.append(time.perf_counter_ns() - began)
        times.append(min(taken[1:]))
    per_image = max(1.0, (times[1] - times[0]) / 24)
    wanted = torch.tensor(min(256.0, max(4.0, 8 + (communicate_ns - times[0]) / per_image)))
    dist.all_reduce(wanted)
    return round(float(wanted) / dist.get_world_size())


def main(path: str) -> None:
    config = msgspec.json.decode(Path(path).read_bytes(), type=Config)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def say(text: str) -> None:
        if rank == 0:
            print(text, file=sys.stderr, flush=True)

    for name in config.policies:
        catalog.get(name)
    outcome = compare(config, say)
    Path(config.out, f"rank-{rank}.json").write_bytes(msgspec.json.encode(outcome))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
