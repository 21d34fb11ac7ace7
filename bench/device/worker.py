"""A rank that trains one network under torch DDP and under gradlane, in turns: `python -m bench.device.worker CONFIG.json`.

All arms are in one process, begin with the same weights and get the same batches, so that their losses are equal bit for
bit after equally many steps. A turn is one step that is not counted and some that are; times are the device's, from the
start of a step to the start of the next. The batch is chosen so that computing takes about as long as an all-reduce of all
gradients, as both are measured here, on both ranks at once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import gradlane
from bench.device.lines import Lines
from bench.device.models import TINY, WORKLOADS, Workload
from gradlane.core.network import Network
from gradlane.core.profile import Profile
from tests.device.deadline import Deadline
from tests.live.networks import counting_deferred_updates

BATCHES = 4  # different ones
ATTACH_S = 4.0  # to measure a network, and to open what carries messages


class Config(msgspec.Struct, frozen=True):
    """What the parent asks for.

    Attributes:
        group: backend of the ranks' process group; over "nccl" ranks that share a device are told of a host each.
        arms: "ddp", or policy@backend; "any" for a backend that is not named. "ddp again" is another DDP.
        batch: samples of each rank; 0: chosen.
        warm: steps of an arm before its first turn, once the policy's own plan is in force.
        auto_steps: steps of `auto` before its first turn, which are counted apart.
        limit_s: seconds for all.
        dry: tiny networks on the CPU.
    """

    out: str
    model: str
    group: str
    arms: tuple[str, ...]
    batch: int
    turns: int
    steps: int
    warm: int
    auto_steps: int
    limit_s: float
    dry: bool


@contextlib.contextmanager
def _naming(arm: str) -> Iterator[None]:
    """An exception inside has the name of the arm, without which the parent may try again."""
    try:
        yield
    except Exception as error:
        error.arm = arm  # type: ignore[attr-defined]
        raise


class Clock:
    """Marks on the script's stream, or of the host where there is no device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self._device.type == "cpu":
            self.marks.append(time.perf_counter())
        else:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)

    def steps_ms(self) -> list[float]:
        """Time between neighbouring marks. Waits for the device."""
        if self._device.type == "cpu":
            return [1e3 * (end - start) for start, end in itertools.pairwise(self.marks)]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in itertools.pairwise(self.marks)]


class Arm:
    """One model with its optimizer and its way of summing gradients.

    Args:
        name: as in `Config.arms`.
        known: network and profile, if others have measured them.
    """

    def __init__(self, name: str, load: Workload, device: torch.device, data: list[Any], known: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.name, self._device, self._data = name, device, data
        model = load.make().to(device)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.call: nn.Module = model
        self.session: Any = None
        if name.startswith("ddp") and "@" not in name:
            self.call = nn.parallel.DistributedDataParallel(model)
        else:
            policy, _, backend = name.partition("@")
            options: dict[str, Any] = {"timeout": 60, **known, **({} if backend == "any" else {"backend": backend})}
            self.session = gradlane.attach(model, self.optimizer, policy, **options)
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        x, y = self._data[len(self.losses) % len(self._data)]
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.call(x), y)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def run(self, steps: int) -> list[float]:
        """How long each of so many steps took on the device, in ms."""
        began = time.perf_counter()
        clock = Clock(self._device)
        for _ in range(steps):
            clock.mark()
            self.step()
        clock.mark()
        taken = clock.steps_ms()
        self._step_s = (time.perf_counter() - began) / steps
        return taken

    def seconds_of(self, steps: int) -> float:
        """What so many steps will take, by those before."""
        return steps * self._step_s

    def warm_up(self, steps: int, auto_steps: int) -> tuple[list[float], bool]:
        """Steps until the plan that is measured is in force, as many on all ranks; and whether it is."""
        if self.session is None:
            return self.run(steps), True
        taken = self.run(auto_steps if self.name.startswith("auto") else 4)
        for _ in range(8):  # what is measured or given differs by arm, and not by rank
            if self.session.settled:
                break
            taken += self.run(1)
        settled = self.session.settled and not self.session.tuning
        return taken + self.run(steps), settled


def main() -> None:
    """Ends the process at once: to take down several models, sessions and groups may last longer than to measure them."""
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Config)
    rank = int(os.environ["RANK"])
    lines = Lines(Path(config.out) if rank == 0 else None)
    code = 0
    try:
        _measure(config, Deadline(config.limit_s), lines)
    except Exception as error:
        told = Lines(Path(config.out))  # any rank may be the first to fail
        told.add("error", model=config.model, arm=getattr(error, "arm", ""), rank=rank, text=traceback.format_exc(limit=-6))
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def _measure(config: Config, deadline: Deadline, lines: Lines) -> None:
    warnings.simplefilter("ignore")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # it costs time, and nothing here reads memory that was not written
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.set_float32_matmul_precision("high")
    device = torch.device("cpu")
    if config.dry:
        torch.set_num_threads(1)
    else:
        device = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if config.group == "nccl" and torch.cuda.device_count() < 2:
        os.environ["NCCL_HOSTID"] = f"host-{os.environ['RANK']}"
    dist.init_process_group(config.group)
    load = (TINY if config.dry else WORKLOADS)[config.model]
    net = load.make()
    sizes = [param.numel() * param.element_size() for param in net.parameters()]
    communicate_s = _all_reduce_s(sum(sizes))
    compute_s = _computing_s(net.to(device), load, device)
    batch = config.batch or max(1, min(load.most, round(load.probe * communicate_s / compute_s)))
    batch = _from_rank_0(batch)
    del net
    lines.add(
        "model",
        model=config.model,
        tensors=len(sizes),
        megabytes=sum(sizes) / 1e6,
        batch=batch,
        dtype="float32, TF32 products" if not config.dry else "float32",
        all_reduce_ms=communicate_s * 1e3,
        computing_ms=compute_s * 1e3 * batch / load.probe,
        after_s=config.limit_s - deadline.left_s,
    )
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    data = [tuple(part.to(device) for part in load.batch(batch, generator)) for _ in range(BATCHES)]
    with counting_deferred_updates() as deferred:
        arms = _arms(config, load, device, data, deadline, lines)
        _turns(config, arms, deferred, deadline, lines)
    for arm in arms:
        if arm.session is not None:
            arm.session.close()
    _losses(config.model, arms, lines)
    with contextlib.suppress(RuntimeError):  # who is through first may be gone already
        dist.barrier()


def _arms(config: Config, load: Workload, device: torch.device, data: list[Any], deadline: Deadline, lines: Lines) -> list[Arm]:
    """Make the arms and warm them up, while there is time."""
    arms: list[Arm] = []
    networks: dict[str, Network] = {}
    profile: Profile | None = None
    for name in config.arms:
        if arms:  # the first one's steps tell how long the others' will take
            before = config.warm + (config.auto_steps if name.startswith("auto") else 4)
            steps = before + (len(arms) + 1) * config.turns * (config.steps + 1)
            if _from_rank_0(int(deadline.left_s < ATTACH_S + arms[0].seconds_of(steps))):
                reason = f"no time: {config.limit_s:.0f} s for this network, whose steps take {arms[0].seconds_of(1):.2f} s"
                lines.add("left out", model=config.model, arm=name, reason=reason)
                continue
        began = time.perf_counter()
        policy, _, backend = name.partition("@")
        known: dict[str, Any] = {}
        if policy != "auto" and backend in networks:
            known = {"network": networks[backend], "profile": profile}
        with _naming(name):
            arm = Arm(name, load, device, data, known)
            attached_s = time.perf_counter() - began
            warm_ms, settled = arm.warm_up(config.warm, config.auto_steps)
        if arm.session is not None and policy != "auto" and arm.session.has_profile:
            networks.setdefault(backend, arm.session.network)
            profile = profile or arm.session.profile()
        arms.append(arm)
        plan = None if arm.session is None else arm.session.plan
        lines.add(
            "warm-up",
            model=config.model,
            arm=name,
            step_ms=warm_ms,
            attach_s=attached_s,
            settled=settled,
            policy=plan and plan.policy,
            backend=plan and str(arm.session.metrics()["backend"]),
            messages=plan and len(plan.messages),
            memory_gb=torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None,
        )
    return arms


def _turns(config: Config, arms: list[Arm], deferred: list[int], deadline: Deadline, lines: Lines) -> None:
    for turn in range(config.turns):
        for arm in arms if turn % 2 == 0 else arms[::-1]:
            if _from_rank_0(int(deadline.left_s < 2 * arm.seconds_of(config.steps + 1))):
                lines.add("left out", model=config.model, arm=arm.name, turn=turn, reason="time was up")
                continue
            with _naming(arm.name):
                dist.barrier()
                arm.run(1)
                before, calls = sum(deferred), len(deferred)
                taken = arm.run(config.steps)
            lines.add(
                "turn",
                model=config.model,
                arm=arm.name,
                turn=turn,
                step_ms=taken,
                deferred=(sum(deferred) - before) / config.steps,
                batches=(len(deferred) - calls) / config.steps,
            )
            if arm.session is not None:
                arm.session.flush()


def _losses(model: str, arms: list[Arm], lines: Lines) -> None:
    """Whether each arm's losses are those of torch DDP, on this rank and the others, for as many steps as both had."""
    reference = torch.stack(arms[0].losses)
    for arm in arms[1:]:
        losses = torch.stack(arm.losses)
        steps = min(len(losses), len(reference))
        equal = torch.equal(losses[:steps], reference[:steps])
        all_equal = torch.tensor(float(equal), device=_where())
        dist.all_reduce(all_equal, op=dist.ReduceOp.MIN)
        worst = float((losses[:steps] - reference[:steps]).abs().max())
        lines.add(
            "losses",
            model=model,
            arm=arm.name,
            steps=steps,
            equal=bool(all_equal),
            most_apart=worst,
            last=float(losses[steps - 1]),
        )


def _all_reduce_s(size_bytes: int) -> float:
    """Of all gradients at once, in the memory that the group sums, the shorter of two, on the slower rank."""
    data = torch.zeros(size_bytes // 4, device=_where())
    taken = []
    for _ in range(2):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(data)
        float(data[0])
        taken.append(time.perf_counter() - began)
    return _slowest(min(taken))


def _computing_s(net: nn.Module, load: Workload, device: torch.device) -> float:
    """Forward and backward pass of `load.probe` samples, on all ranks at once; the median of three, on the slower rank."""
    x, y = (part.to(device) for part in load.batch(load.probe, torch.Generator().manual_seed(1)))
    taken = []
    for turn in range(6):
        if turn == 3:
            dist.barrier()
        began = time.perf_counter()
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return _slowest(sorted(taken[3:])[1])


def _where() -> str:
    """Memory that the default group carries."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def _slowest(seconds: float) -> float:
    longest = torch.tensor(seconds, device=_where())
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def _from_rank_0(number: int) -> int:
    decided = torch.tensor(number, device=_where())
    dist.broadcast(decided, 0)
    return int(decided)


if __name__ == "__main__":
    main()
