"""A cluster in a box: each rank on its own emulated host, joined by shaped links, without root.

    run(LabSpec(hosts=4, link_bits_per_second=parse_rate("500mbit")), ["python", "train.py"])

A host is a network namespace. The kernel removes hosts, links and processes when the run ends,
however it ends. A lab changes nothing outside its namespaces, and nothing inside reaches the
network outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradlane.lab.launcher import execute, run, supported
from gradlane.lab.messages import INTERRUPTED, RunOutcome
from gradlane.lab.spec import Flow, HostSpec, JobSpec, LabSpec

if TYPE_CHECKING:
    from gradlane.core.profile import Profile
    from gradlane.emulation.model import Emulated

__all__ = [
    "INTERRUPTED", "Flow", "HostSpec", "JobSpec", "LabSpec", "RunOutcome", "emulated", "execute", "run", "supported",
]  # fmt: skip


def emulated(profile: Profile, **options: Any) -> Emulated:
    """A torch module with the parameters and times of `profile`; see `gradlane.emulation.model`."""
    from gradlane.emulation.model import Emulated  # the only part of a lab that needs torch

    return Emulated(profile, **options)
