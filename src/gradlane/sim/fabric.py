"""Fabric: what carries messages in virtual time, and the words that all fabrics share.

A job is one training run; a rank is one simulated worker of one job. A `Simulation` hands messages
over to a fabric and lets time pass. The fabric tells it when a message has been pushed (it has left
the rank for the servers) and pulled (the rank has the sum). There are three fabrics:
`allreduce.CollectiveFabric` for collectives; `fluid` for parameter servers and workers that are all
alike, of which one stands for all; and `packets` for parameter servers and any workers.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.errors import InputError

FOREVER = 2**62


class Job(msgspec.Struct, frozen=True):
    """A training run.

    Args:
        plan: what its Dispatchers carry out.
        profile: one iteration's computation; has the tensors of the plan.
        placement: the index of each tensor's server; None shards packets over all servers by their
            weights.
        workers: indices of the cluster's workers that the job uses; None: all.

    Raises:
        InputError: the plan is for other tensors, or the placement is not one server for each
            tensor.
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
    """What a fabric tells: at `now_ns` a message of a rank has been pushed, or with `pulled` its
    sum has arrived.
    """

    now_ns: int
    rank: int
    message: int
    pulled: bool


class Fabric(Protocol):
    """What a `Simulation` asks of a fabric.

    One simulation owns a fabric; the times that it passes never go back.
    """

    events: int
    """How many steps of its own the fabric has taken, as a measure of cost."""

    def hand_over(self, now_ns: int, rank: int, message: int) -> None:
        """A rank starts a message at `now_ns`; of a two-phase message, its first half."""
        ...

    def ask(self, now_ns: int, rank: int, message: int) -> None:
        """A rank starts the second half of a two-phase message.

        The sum is returned when every rank has done so.
        """
        ...

    def next_ns(self) -> int:
        """The time in ns of the fabric's next event if nothing is handed over before; `FOREVER` if
        there is none.
        """
        ...

    def run(self, until_ns: int) -> list[Notice]:
        """Let time pass until the first notice, but not beyond `until_ns`.

        Returns:
            The notices of that time; none if there is no notice by `until_ns`.
        """
        ...
