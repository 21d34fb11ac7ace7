"""What there is to test on: the devices of this machine, and which ranks are started on them."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

NO_DEVICE = "this machine has no CUDA device"


@dataclass(frozen=True)
class Machine:
    """What was found.

    Attributes:
        cards: names of the CUDA devices.
        driver: version of the driver; "" where there is none.
        torch: version of PyTorch; it names the CUDA that it was built for.
        nccl: whether PyTorch has NCCL.
        compiles: whether `torch.compile` has what it needs for these devices.
    """

    cards: tuple[str, ...]
    driver: str
    torch: str
    nccl: bool
    processors: int
    compiles: bool


@dataclass(frozen=True)
class Setup:
    """Ranks that are started together.

    Attributes:
        group: backend of their process group.
        device: type of the device that they train on.
        stand_in: the CPU is taken for a device with streams.
    """

    group: str
    ranks: int
    device: str = "cuda"
    stand_in: bool = False

    @property
    def carriers(self) -> tuple[str, ...]:
        """What carries messages here: NCCL has no part in servers, which are tried over Gloo."""
        return ("all-reduce",) if self.group == "nccl" else ("all-reduce", "server")

    @property
    def title(self) -> str:
        return f"{self.group}, {self.ranks} rank{'s' * (self.ranks > 1)}{', stand-in on the CPU' * self.stand_in}"


def found() -> Machine:
    """The devices of this machine. Needs torch."""
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
    )


def setups(machine: Machine) -> list[Setup]:
    """Which ranks to start: two over Gloo, which share a single device, and over NCCL one for each device.

    Of a machine without a device: as for one with a single device.
    """
    return [Setup("gloo", 2), *([Setup("nccl", max(1, len(machine.cards)))] if machine.nccl or not machine.cards else [])]


STAND_IN = Setup("gloo", 2, device="cpu", stand_in=True)


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _has_triton() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None
