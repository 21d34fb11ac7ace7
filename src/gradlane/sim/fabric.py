"""Fabric: what carries messages to parameter servers and back, in virtual time.

A job is one training run; a rank is one simulated worker of one job. The owner hands messages over and lets
time pass; the fabric says when a message has been pushed (it has left for the servers) and pulled (the rank has the sum).
Two fabrics: `fluid`, for workers that are all alike, of which one stands for all, and `packets`, for any.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.errors import InputError

FOREVER = 2**62


class Job(msgspec.Struct, frozen=True):
    """A training run on a cluster.

    placement: the server of each tensor, as an index; None deals packets over all servers by their weights.
    workers: which of the cluster's workers it uses; None: all.
    """

    plan: Plan
    profile: Profile
    placement: tuple[int, ...] | None = None
    workers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.plan.tensors != self.profile.specs:
            raise InputError(f"job: got a plan for {self.plan.model}, expected one for {self.profile.model} and its tensors")
        if self.placement is not None and len(self.placement) != len(self.profile.tensors):
            raise InputError(f"placement: got {len(self.placement)} servers, expected one for each tensor")


class Notice(NamedTuple):
    """At `now_ns` the message of a rank has been pushed, or with `pulled` it has arrived back."""

    now_ns: int
    rank: int
    message: int
    pulled: bool


class Fabric(Protocol):
    """Owned by one simulation. Times never go back."""

    events: int
    """How many steps of its own the fabric has taken."""

    def hand_over(self, now_ns: int, rank: int, message: int) -> None:
        """A rank starts a message."""
        ...

    def ask(self, now_ns: int, rank: int, message: int) -> None:
        """A rank starts the second half of a two-phase message, whose sum is returned when every rank has."""
        ...

    def next_ns(self) -> int:
        """When something happens next if nothing is handed over before; `FOREVER` if nothing does."""
        ...

    def run(self, until_ns: int) -> list[Notice]:
        """Let time pass to `until_ns`, or to the first notice; returns the notices of that time."""
        ...
