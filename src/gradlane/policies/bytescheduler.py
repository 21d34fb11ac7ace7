"""ByteScheduler: slices by priority under a credit window."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gradlane.core.fields import MAX_BYTES, need, need_int
from gradlane.core.network import Network
from gradlane.core.plan import Lane, Plan, Wire
from gradlane.core.policy import SIZES, UNTIL, KnobRange, sliced_by_urgency
from gradlane.core.profile import Profile

_WIRES: dict[str, Wire] = {"priority": "pull-priority", "arrival": "fifo"}


class ByteScheduler(msgspec.Struct, frozen=True):
    """Slices by priority of first use, within a credit of unfinished bytes (§4.2, Algorithm 1).

    Tensors are cut into partitions. The most urgent ready one starts next, while unfinished ones
    fit the credit. Servers return the most urgent sum first (Theorem 1), or sums in order of arrival (`pulls="arrival"`), as
    they do for the authors' code, which pulls a partition as soon as it is pushed.

    Wins where large tensors block urgent ones and a startup is short, once both sizes are tuned
    (`--tune`). The sizes below are too small for many workers.

    Differs from the paper: a slice starts if the credit equals its size. Line 16 asks for more, so that a window of
    one slice would never open. A lone slice larger than the credit may go. Over servers a slice gives its credit back
    when its bytes have left. In the paper it does so when servers have acknowledged it (`until="acknowledged"`), which
    leaves a link idle while nothing else is in the window. Over all-reduce the credit comes back with the sum, as in the paper.
    `gradlane.planning.tuning` searches the knobs (§4.3), not the policy.

    All-reduces have one order on all ranks. In the paper rank 0 decides it while the iteration runs, and tells the
    others (§5); `attach(order="coordinator")` does so. By default the plan has an order, found by running it in
    virtual time. Parameters cross the barrier between iterations in PyTorch only; sessions of gradlane
    train no other framework.

    Attributes:
        partition_bytes: the largest slice.
        credit_bytes: how many bytes may be unfinished.
        pulls: how servers order the sums that they return: by "priority", or by "arrival".
        until: over servers a slice takes its credit until it was "sent", or until it is "acknowledged".
    """

    name: ClassVar[str] = "bytescheduler"
    paper: ClassVar[str] = "ByteScheduler (SOSP '19) Algorithm 1"
    differs: ClassVar[str] = (
        "credit equal to the slice suffices, and over servers comes back without an acknowledgement (knob until); "
        "over all-reduce the plan's order by default, the paper's with rank 0 deciding; only PyTorch crosses the barrier"
    )

    tunable: ClassVar[dict[str, KnobRange]] = {"partition_bytes": SIZES, "credit_bytes": SIZES}

    partition_bytes: int = 2**20
    credit_bytes: int = 4 * 2**20
    pulls: str = "priority"
    until: str = "sent"

    def __post_init__(self) -> None:
        need_int("partition_bytes", self.partition_bytes, 8, MAX_BYTES)
        need_int("credit_bytes", self.credit_bytes, 1, MAX_BYTES)
        need(self.pulls in _WIRES, "pulls", self.pulls, " or ".join(map(repr, _WIRES)))
        need(self.until in UNTIL, "until", self.until, " or ".join(map(repr, UNTIL)))

    @property
    def wire_over_servers(self) -> Wire:
        """As `core.policy.wire_over_servers` has it."""
        return _WIRES[self.pulls]

    def plan(self, profile: Profile, network: Network) -> Plan:
        messages = sliced_by_urgency(profile, self.partition_bytes, "partition_bytes")
        lanes = (Lane(window_bytes=self.credit_bytes, acknowledged=UNTIL[self.until]),)
        return Plan(self.name, profile.model, profile.specs, messages, lanes, crosses_barrier=True)
