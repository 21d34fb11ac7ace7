"""Arms: what is compared in one run, side by side."""

from __future__ import annotations

import msgspec

from gradlane.core.executors import BackendName

BASELINE = "torch-ddp"
ALONE = "no-communication"


class ArmSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy over a backend; beside such arms there are always torch DDP and computing without communication."""

    policy: str
    backend: BackendName = "all-reduce"

    @property
    def name(self) -> str:
        return self.policy if self.backend == "all-reduce" else f"{self.policy}@{self.backend}"
