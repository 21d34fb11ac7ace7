"""Arms: what is compared in one run, side by side."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gradlane.core import files
from gradlane.core.backends import BackendName
from gradlane.core.network import Network

BASELINE = "torch-ddp"
ALONE = "no-communication"


class ArmSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy over a backend. Torch DDP and computation without communication are further arms.

    Attributes:
        policy, backend, knobs: what runs.
        label: a name, if the policy's would not be unique.
        packet_bytes: of the transport; None: its default.
        servers: servers in processes and on hosts of their own; 0: one in each worker's process.
    """

    policy: str
    backend: BackendName = "all-reduce"
    label: str = ""
    knobs: dict[str, int] = {}
    packet_bytes: int | None = None
    servers: int = 0

    @property
    def name(self) -> str:
        return self.label or (self.policy if self.backend == "all-reduce" else f"{self.policy}@{self.backend}")

    @property
    def place(self) -> str:
        """Name of the place whose network measurement this arm uses."""
        return f"{self.backend}-{self.servers}" if self.servers else self.backend


def measured_network(folder: Path, arm: str, spec: ArmSpec) -> Network:
    """The network on which rank 0 of a run summed.

    Args:
        folder: of the run.
        arm, spec: whose sums. Torch's DDP has a network of its own where sessions sum within hosts
            first.

    Raises:
        OSError, FormatError: there is none that can be read.
    """
    own = folder / f"network-{BASELINE}-rank0.json"
    return files.read(own if arm == BASELINE and own.exists() else folder / f"network-{spec.place}-rank0.json", Network)
