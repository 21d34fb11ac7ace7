"""Arms: what is compared in one run, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import quote

import msgspec
from msgspec import UNSET

from gradlane.core import files
from gradlane.core.backends import BackendName
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.records.search_log import ANY

BASELINE = "torch-ddp"
ALONE = "no-communication"


class ArmSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy over a backend. Torch DDP and computation without communication are further arms.

    Attributes:
        policy, knobs: what runs.
        backend: what carries it; "any": none is named, and `auto` chooses.
        label: a name, if the policy's would not be unique.
        packet_bytes: of the transport; None: its default.
        servers: servers in processes and on hosts of their own; 0: one in each worker's process.
    """

    policy: str
    backend: BackendName | Literal["any"] = "all-reduce"
    label: str = ""
    knobs: dict[str, int | float | str] = {}
    packet_bytes: int | None = None
    servers: int = 0

    @property
    def name(self) -> str:
        return self.label or (self.policy if self.backend == "all-reduce" else f"{self.policy}@{self.backend}")

    @property
    def place(self) -> str:
        """Name of the place whose network measurement this arm uses."""
        return f"{self.backend}-{self.servers}" if self.servers else self.backend


def in_file(arm: str) -> str:
    """An arm's name as a part of a file's name, a different one for each: "p3,slice_bytes=1MiB" for "p3:slice_bytes=1MiB".

    A user's own policy may have any name, and some file systems refuse ":" and other characters.
    """
    return quote(arm, safe="@=").replace("%3A", ",")


def file_of(what: str, arm: str, rank: int | None = None) -> str:
    """Name of the file with one thing of an arm, in a run's folder.

    Args:
        what: "plan", "timeline", "network" or "search".
        arm: the arm's name.
        rank: whose it is; None: there is one for all.
    """
    return f"{what}-{in_file(arm)}" + ("" if rank is None else f"-rank{rank}") + ".json"


def measured_place(folder: Path, arm: str, spec: ArmSpec, plan: Plan) -> Place:
    """Where an arm's plan ran, with the network as rank 0 of the run measured it.

    Args:
        folder: of the run.
        arm, spec: whose plan. Two kinds of arm have a network of their own: torch's DDP, where
            sessions sum within hosts first, and those that choose what carries their messages.
        plan: the plan that was in force.

    Raises:
        OSError, FormatError: there is no network that can be read.
    """
    backend = spec.backend
    if backend == ANY:
        backend = "all-reduce" if plan.backend is UNSET else plan.backend
    own = folder / file_of("network", arm, 0)
    network = files.read(own if own.exists() else folder / file_of("network", spec.place, 0), Network)
    return Place(network, backend, spec.servers)
