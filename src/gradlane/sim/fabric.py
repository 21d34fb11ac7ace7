"""Fabric: what carries messages in virtual time, and the words that all fabrics share.

A job is one training run; a rank is one simulated worker of one job. A `Simulation` hands messages over to a fabric and lets
time pass. The fabric tells it when a message has been pushed (it has left the rank for the servers) and pulled (the rank has
the sum). Three fabrics carry messages between hosts: `collectives.CollectiveFabric` for collectives, and two for parameter
servers. In `fluid` all workers are alike and one stands for all; `packets` takes any workers. Two go around others:
`hosts.HostFabric` with the stages within hosts, and `norms.NormsFabric` with what owners tell over servers.
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
        plan: the plan that every rank of it carries out; its tensors are those of `profile`.
        profile: one iteration of its model.
        placement: the server of each tensor, as an index, or None for a tensor whose packets are dealt over all
            servers by their weights; None deals all packets so.
        workers: the indices of the cluster's workers that it uses; None: all.

    Raises `InputError` where plan, profile and placement do not go together.
    """

    plan: Plan
    profile: Profile
    placement: tuple[int | None, ...] | None = None
    workers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.plan.tensors != self.profile.specs:
            raise InputError(f"job: got a plan for {self.plan.model}, expected one for {self.profile.model} and its tensors")
        if self.placement is not None and len(self.placement) != len(self.profile.tensors):
            raise InputError(f"placement: got {len(self.placement)} servers, expected one for each tensor")


class Notice(NamedTuple):
    """Something that has happened to a message of a rank.

    Args:
        now_ns: when, in virtual time.
        rank: the number of the rank, from 0.
        message: an index into the messages of its job's plan.
        pulled: False where the message has been pushed; True where the rank has its sum.
    """

    now_ns: int
    rank: int
    message: int
    pulled: bool


class Fabric(Protocol):
    """Carries the messages of one simulation, which owns it.

    Times are integers in ns from the start of the simulation, and never go back: neither the times that methods are
    called with nor those of notices.

    The life of a message in one iteration of a rank: the rank hands it over; the fabric tells that
    it was pushed; then that its sum was pulled. Of a two-phase message (`Message.two_phase`) the
    rank asks for the sum after it was pushed, and only then it may be pulled. Each is told once. In
    the next iteration the same message is handed over again.

    What a sum waits for is the fabric's to know: synchronous ones wait for every rank of the job.

    `gradlane.testing.fabrics.check_fabric` checks all that is promised here.
    """

    events: int
    """How many steps of its own the fabric has taken: a measure of its work, which never falls."""

    def hand_over(self, now_ns: int, rank: int, message: int) -> None:
        """A rank starts a message, or the first phase of one of two phases.

        Args:
            now_ns: when: the time of the last notice, or a later one to which `run` has run.
            rank: the number of the rank, from 0.
            message: an index into the messages of its job's plan; none of the rank's own that is
                under way.
        """
        ...

    def ask(self, now_ns: int, rank: int, message: int) -> None:
        """A rank starts the second phase of a two-phase message: it asks for the sum.

        Args:
            now_ns: as of `hand_over`.
            rank: the number of the rank, from 0.
            message: an index into the messages of its job's plan; of this rank it was pushed.
        """
        ...

    def next_ns(self) -> int:
        """When something happens next in the fabric if nothing is handed over before.

        Returns:
            Virtual time in ns, which is now or later; `FOREVER` where nothing is under way, or
            where what is under way waits for a rank. It need not be the time of a notice.
        """
        ...

    def run(self, until_ns: int) -> list[Notice]:
        """Let time pass to `until_ns`, or to the first notice if that comes earlier.

        Args:
            until_ns: below `FOREVER`; now or later.

        Returns:
            All notices of one time, `until_ns` or earlier, in the order in which they happened; an
            empty list if there are none, and then `next_ns()` is later than `until_ns`.
        """
        ...
