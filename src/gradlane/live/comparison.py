"""The worker of `gradlane compare`: one rank that trains the same model under torch DDP and under every
policy, in turns, and leaves what it measured as files for the parent to read.

The model is the demonstration's network on real images, or an emulated device with a profile's times.

All arms live side by side and take turns of a few steps, so that a noisy machine disturbs them alike. A
step is timed from its start to the start of the next, so that what a policy leaves for the next forward
pass is counted there; the first step of a turn follows a flush and is not counted. Network and profile are measured by the
first arm that needs them and serve the others, the network while a thread beside computes; `auto` measures both for itself,
and is measured once it has settled.

Run as `python -m gradlane.live.comparison CONFIG` under any torchrun-like launcher.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from gradlane.core import files
from gradlane.core.arms import ALONE, BASELINE, ArmSpec
from gradlane.core.chosen import AUTO
from gradlane.core.profile import Profile
from gradlane.live.attachment import attach
from gradlane.live.demo import Digits, DigitsNet
from gradlane.live.emulated import Emulated
from gradlane.live.probe import measure
from gradlane.live.session import Session
from gradlane.tune import catalog

WARM_UP_STEPS = 3  # as many again, until the final plan is in force
MOST_EXTRA_TURNS = 60  # of as many steps, where it takes more to settle


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the parent asks for.

    profile: a file; the model is an emulated device with its times. Without one it is the demonstration's network, with
    batch_size 0 at the batch for which computing takes as long as communicating. measures: whether the first arm measures
    the profile that all plan from; else that is the device's own.
    """

    out: str
    arms: tuple[ArmSpec, ...]
    rounds: int
    steps: int
    batch_size: int
    timeout_s: float
    profile: str = ""
    measures: bool = True


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


class Workload(Protocol):
    """A model, and the loss of its next step when it is called through `call`."""

    @property
    def model(self) -> nn.Module: ...

    def loss(self, call: nn.Module) -> torch.Tensor: ...


class _Demonstration:
    def __init__(self, batch_size: int) -> None:
        torch.manual_seed(0)
        self.model = DigitsNet()
        self._data = Digits(dist.get_rank(), dist.get_world_size(), batch_size)

    def loss(self, call: nn.Module) -> torch.Tensor:
        images, labels = self._data.batch()
        return nn.functional.cross_entropy(call(images), labels)


class Device:
    """An emulated one."""

    def __init__(self, profile: Profile) -> None:
        self.model = Emulated(profile)

    def loss(self, call: nn.Module) -> torch.Tensor:
        total: torch.Tensor = call()
        return total


class Arm:
    """One model with its optimizer, its data and its way of summing gradients."""

    def __init__(self, name: str, spec: ArmSpec | None, load: Workload, timeout_s: float, **known: Any) -> None:
        """known: the network or the profile, where it is not to be measured."""
        self.name, self.load = name, load
        self.model = load.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        self.call: nn.Module = self.model
        self.session: Session | None = None
        if spec is not None:
            policy = AUTO if spec.policy == AUTO else catalog.get(spec.policy, **spec.knobs)
            known |= {"backend": spec.backend, "packet_bytes": spec.packet_bytes, "servers": spec.servers}
            self.session = attach(self.model, self.optimizer, policy, timeout=timeout_s, **known)
        elif name == BASELINE:
            self.call = nn.parallel.DistributedDataParallel(self.model)
        self.step_ns: list[int] = []
        self.last_loss = float("nan")
        self.extra_turns = 0  # that others did not have

    def warm_up(self) -> None:
        """Until the plan is the policy's own: the first arm profiles, Prophet for as long as it takes, and auto looks."""
        self.turn(WARM_UP_STEPS, count=False)
        if self.session is None:
            return
        while (self.session.tuning or not self.session.settled) and self.extra_turns < MOST_EXTRA_TURNS:
            self.turn(WARM_UP_STEPS, count=False)
            self.extra_turns += 1

    def turn(self, steps: int, count: bool) -> None:
        dist.barrier()
        marks = []
        for _ in range(steps + 1):
            marks.append(time.perf_counter_ns())
            loss = self.step()
        marks.append(time.perf_counter_ns())
        if self.session is not None:
            self.session.flush()
        self.last_loss = float(loss.detach())
        if count:
            self.step_ns += [end - start for start, end in itertools.pairwise(marks[1:])]

    def step(self) -> torch.Tensor:
        """One iteration; its loss."""
        self.optimizer.zero_grad()
        loss = self.load.loss(self.call)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss

    def bits(self) -> list[torch.Tensor]:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]


def compare(config: Config, say: Callable[[str], None]) -> Outcome:
    """Run all arms and return this rank's outcome; `say` hears of progress on rank 0."""
    rank = dist.get_rank()
    profile = files.read(config.profile, Profile) if config.profile else None
    model = Emulated(profile) if profile is not None else DigitsNet()
    size_bytes = sum(param.numel() * param.element_size() for param in model.parameters())
    group = dist.new_group()
    with _computing(Device(profile) if profile is not None else _Demonstration(8)):
        found = measure(group, torch.device("cpu"), "measured by compare, beside computing", budget_s=3.0)
    networks = {ArmSpec("ddp").place: found}
    communicate_ns = networks["all-reduce"].cost_ns(size_bytes)
    batch_size = 0
    described = repr(model)
    if profile is None:
        batch_size = config.batch_size or _batch_size_for(communicate_ns)
        described = f"{type(model).__name__} on digits at batch {batch_size}"
    say(f"{described}\nall-reduce of the {size_bytes / 2**20:.1f} MiB of gradients: {communicate_ns / 1e6:.0f} ms")
    specs = (None, None, *config.arms)
    arms: list[Arm] = []
    known = model.profile if isinstance(model, Emulated) and not config.measures else None
    for turn in range(config.rounds + 1):
        for place, spec in enumerate(specs):
            began = time.perf_counter()
            if turn:
                arm = arms[place]
                arm.turn(config.steps, count=True)
            else:
                name = spec.name if spec is not None else (BASELINE, ALONE)[place]
                load: Workload = Device(profile) if profile is not None else _Demonstration(batch_size)
                measured: dict[str, Any] = {}
                if spec is not None and spec.policy != AUTO:
                    measured = {"network": networks.get(spec.place), "profile": known}
                beside = Device(profile) if profile is not None else _Demonstration(batch_size)
                with _computing(beside) if measured.get("network", beside) is None else contextlib.nullcontext():
                    arm = Arm(name, spec, load, config.timeout_s, **measured)
                arms.append(arm)
                began = time.perf_counter()
                arm.warm_up()
                if spec is not None and arm.session is not None:
                    networks.setdefault(spec.place, arm.session.network)
                    known = known or arm.session.profile()
            steps = config.steps + 1 if turn else (WARM_UP_STEPS + 1) * (1 + arm.extra_turns)
            each_ms = (time.perf_counter() - began) / steps * 1e3
            say(
                f"[{turn * len(specs) + place + 1:3d}/{(config.rounds + 1) * len(specs)}] "
                f"{f'round {turn}' if turn else 'warm-up'} {arm.name:16s} {each_ms:7.1f} ms a step"
                + (f", loss {arm.last_loss:.3f}" if profile is None else "")
            )
    outcomes = _leave(arms, Path(config.out), rank)
    for over, network in networks.items():
        files.write(Path(config.out, f"network-{over}-rank{rank}.json"), network)
    return Outcome(rank, described, size_bytes, batch_size, communicate_ns, networks["all-reduce"].source, outcomes)


def _leave(arms: list[Arm], out: Path, rank: int) -> dict[str, ArmOutcome]:
    """Plans, timelines and profiles as files, and what came out of each arm, beside DDP after as many steps."""
    outcomes = {}
    for arm in sorted(arms, key=lambda arm: arm.extra_turns):
        for _ in range(arms[0].extra_turns, arm.extra_turns):  # DDP catches up
            arms[0].turn(WARM_UP_STEPS, count=False)
            arms[0].extra_turns += 1
        equal = all(torch.equal(a, b) for a, b in zip(arms[0].bits(), arm.bits(), strict=True))
        messages = 0
        if arm.session is not None:
            files.write(out / f"timeline-{arm.name}-rank{rank}.json", arm.session.timeline())
            files.write(out / f"plan-{arm.name}-rank{rank}.json", arm.session.plan)
            files.write(out / f"profile-rank{rank}.json", arm.session.profile())
            messages = len(arm.session.plan.messages)
            arm.session.close()
        outcomes[arm.name] = ArmOutcome(tuple(arm.step_ns), arm.last_loss, equal, messages)
    return {arm.name: outcomes[arm.name] for arm in arms}


@contextlib.contextmanager
def _computing(load: Workload) -> Iterator[None]:
    """Iterations in a thread beside: messages share the processors with computing, as they do while training."""
    ended = threading.Event()

    def train() -> None:
        while not ended.is_set():
            load.loss(load.model).backward()  # type: ignore[no-untyped-call]

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


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

    outcome = compare(config, say)
    Path(config.out, f"rank-{rank}.json").write_bytes(msgspec.json.encode(outcome))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
