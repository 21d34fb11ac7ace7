"""Run by each rank of an operating point: one emulated device under every arm, in turns of a few steps.

All arms live side by side, so that a noisy machine disturbs them alike. They plan from the device's own profile, so that none
has to be measured first, and from the network as the first over the same servers measures it. A step is timed from its start
to the start of the next, so that what a policy leaves for the next forward pass is counted there; the first step of a turn
follows a flush and is not counted.

argv: a file with a `Config`. Rank 0 leaves a `Trained`.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from experiments.lab.first_come import FirstCome
from gradlane.core import files
from gradlane.core.executors import BackendName
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.core.profile import Profile
from gradlane.core.timeline import Timeline
from gradlane.tune import catalog

if TYPE_CHECKING:
    import torch

WARM_UP_STEPS = 3  # until the plan is in force and connections have found their rate
MOST_EXTRA_TURNS = 20


class Arm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy with its knobs over a backend. name: where the same policy is there twice.

    servers: in processes of their own on hosts of their own; 0: one in each worker's process.
    """

    policy: str
    backend: BackendName = "server"
    knobs: dict[str, int] = {}
    packet_bytes: int | None = None
    name: str = ""
    servers: int = 0

    @property
    def label(self) -> str:
        return self.name or (self.policy if self.backend == "server" else f"{self.policy}@{self.backend}")

    @property
    def place(self) -> str:
        """What its network was measured over."""
        return f"{self.backend}/{self.servers}"

    def made(self) -> Policy:
        return FirstCome(**self.knobs) if self.policy == FirstCome.name else catalog.get(self.policy, **self.knobs)


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    profile: str
    arms: tuple[Arm, ...]
    rounds: int
    steps: int
    timeout_s: float
    out: str


class Seen(msgspec.Struct, frozen=True):
    """Of one arm, on rank 0."""

    step_ns: list[int]
    plan: Plan
    timeline: Timeline


class Trained(msgspec.Struct, frozen=True):
    """alone_ns: steps that compute and do not communicate. networks: as measured, by what they were measured over."""

    alone_ns: list[int]
    arms: dict[str, Seen]
    networks: dict[str, Network]


class Taking:
    """A model with its optimizer and its way of summing gradients; without an arm it computes alone."""

    def __init__(self, profile: Profile, arm: Arm | None, network: Network | None, timeout_s: float) -> None:
        import torch

        import gradlane
        from gradlane import lab

        self.model = lab.emulated(profile)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.session: Any = None
        self.step_ns: list[int] = []
        if arm is not None:
            self.session = gradlane.attach(
                self.model,
                self.optimizer,
                arm.made(),
                backend=arm.backend,
                packet_bytes=arm.packet_bytes,
                servers=arm.servers,
                network=network,
                profile=self.model.profile,
                timeout=timeout_s,
            )

    def warm_up(self) -> None:
        self.turn(WARM_UP_STEPS, counts=False)
        for _ in range(MOST_EXTRA_TURNS):
            if self.session is None or (self.session.settled and not self.session.tuning):
                return
            self.turn(1, counts=False)

    def turn(self, steps: int, *, counts: bool) -> None:
        import torch.distributed as dist

        dist.barrier()
        marks = []
        for _ in range(steps + 1):
            marks.append(time.perf_counter_ns())
            self.optimizer.zero_grad()
            self.model().backward()
            self.optimizer.step()
        marks.append(time.perf_counter_ns())
        if self.session is not None:
            self.session.flush()
        if counts:
            self.step_ns += [end - start for start, end in itertools.pairwise(marks[1:])]


def train(config: Config, profile: Profile) -> Trained:
    alone = Taking(profile, None, None, config.timeout_s)
    networks: dict[str, Network] = {}
    taking: dict[str, Taking] = {}
    for arm in config.arms:
        taking[arm.label] = Taking(profile, arm, networks.get(arm.place), config.timeout_s)
        networks.setdefault(arm.place, taking[arm.label].session.network)
    everybody = [alone, *taking.values()]
    for each in everybody:
        each.warm_up()
    for _ in range(config.rounds):
        for each in everybody:
            each.turn(config.steps, counts=True)
    arms = {label: Seen(each.step_ns, each.session.plan, each.session.timeline()) for label, each in taking.items()}
    for each in taking.values():
        each.session.close()
    return Trained(alone.step_ns, arms, networks)


def main(path: str) -> None:
    import torch
    import torch.distributed as dist

    config = msgspec.json.decode(Path(path).read_bytes(), type=Config)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trained = train(config, files.read(config.profile, Profile))
    if dist.get_rank() == 0:
        Path(config.out).write_bytes(msgspec.json.encode(trained))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
