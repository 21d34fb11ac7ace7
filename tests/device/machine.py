"""What there is to test on: the devices of this machine, and which ranks are started on them."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
from dataclasses import dataclass

from tests.live.ranks import Ranks

NO_DEVICE = "this machine has no CUDA device"


@dataclass(frozen=True)
class Machine:
    """What was found.

    Attributes:
        cards: names of the CUDA devices.
        driver: version of the driver; "" where there is none.
        torch: version of PyTorch; it names the CUDA that it was built for.
        nccl: whether PyTorch has NCCL.
        nccl_shares: whether two ranks of NCCL can share the single device of this machine; see `Setup.environments`.
        compiles: whether `torch.compile` has what it needs for these devices.
    """

    cards: tuple[str, ...]
    driver: str
    torch: str
    nccl: bool
    processors: int
    compiles: bool
    nccl_shares: bool = False


@dataclass(frozen=True)
class Setup:
    """Ranks that are started together.

    Attributes:
        group: backend of their process group.
        device: type of the device that they train on.
        stand_in: the CPU is taken for a device with streams.
        shares: the ranks share one device over NCCL.
    """

    group: str
    ranks: int
    device: str = "cuda"
    stand_in: bool = False
    shares: bool = False

    @property
    def environments(self) -> list[dict[str, str]] | None:
        """Of each rank. NCCL refuses two ranks of one host on one device, so that it is told of two hosts; it sums through
        sockets then.
        """
        if not self.shares:
            return None
        return [
            {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"} for rank in range(self.ranks)
        ]

    @property
    def carriers(self) -> tuple[str, ...]:
        """What carries messages here: NCCL has no part in servers, which are tried over Gloo."""
        return ("all-reduce",) if self.group == "nccl" else ("all-reduce", "server")

    @property
    def title(self) -> str:
        return f"{self.group}, {self.ranks} rank{'s' * (self.ranks > 1)}{', stand-in on the CPU' * self.stand_in}"


def found(tries_nccl: bool = False) -> Machine:
    """The devices of this machine. Needs torch.

    Args:
        tries_nccl: whether to try if two ranks share a single device over NCCL, which takes seconds.
    """
    import torch
    import torch.distributed as dist

    cards = tuple(torch.cuda.get_device_name(card) for card in range(torch.cuda.device_count()))
    return Machine(
        cards=cards if torch.cuda.is_available() else (),
        driver=_driver() if cards else "",
        torch=torch.__version__,
        nccl=dist.is_nccl_available(),
        processors=len(os.sched_getaffinity(0)),
        compiles=_has_triton() and shutil.which("gcc") is not None,
        nccl_shares=tries_nccl and len(cards) == 1 and dist.is_nccl_available() and _can_share(),
    )


def setups(machine: Machine) -> list[Setup]:
    """Which ranks to start: two over Gloo, which share a single device, and over NCCL one for each device. Two share a
    single device over NCCL too, if they can.

    Of a machine without a device: as for one with a single device.
    """
    over_nccl = []
    if machine.nccl_shares:
        over_nccl = [Setup("nccl", 2, shares=True)]
    elif machine.nccl or not machine.cards:
        over_nccl = [Setup("nccl", max(1, len(machine.cards)))]
    return [Setup("gloo", 2), *over_nccl]


STAND_IN = Setup("gloo", 2, device="cpu", stand_in=True)


_SHARING_S = 40.0


def _can_share() -> bool:
    """Whether two ranks over NCCL sum on the one device: tried, since releases of NCCL differ."""
    setup = Setup("nccl", 2, shares=True)
    ranks = Ranks(2, "nccl", multiprocessing.get_context("spawn"), setup.environments)
    try:
        answers = ranks.answers("tests.device.machine:sum_over_nccl", _SHARING_S, lambda answer: None if answer[0] else 0.0)
        return answers == [(True, 3.0)] * 2
    finally:
        ranks.kill()


def sum_over_nccl(rank: int, world: int) -> float:
    """What ranks run: the sum of 1 and 2."""
    import torch
    import torch.distributed as dist

    value = torch.full((1000,), rank + 1.0, device="cuda")
    dist.all_reduce(value)
    return float(value[0])


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _has_triton() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None
