"""blocks: gradlane's own policy; over all-reduce `auto` always tries it."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gradlane.core.fields import MAX_BYTES, need_int
from gradlane.core.network import Network
from gradlane.core.plan import Lane, Message, Plan, Slice
from gradlane.core.policy import KnobRange, balanced_bytes, check_cuts, cut, whole
from gradlane.core.profile import Profile


class Blocks(msgspec.Struct, frozen=True):
    """Blocks of about equal size, by priority, two in flight, across the barrier.

    ByteScheduler's slices keep a large tensor from blocking an urgent one; MG-WFBP's merges keep
    startups from adding up. One rule gives both. Blocks of b bytes cost S / b startups a for a
    model of S bytes, and an urgent block waits for the w blocks in flight at rate r. The sum a S /
    b + w b / r is least at b = sqrt(a S r / w). Small tensors are merged up to that size, larger
    ones cut to it, and a block is as urgent as its most urgent tensor. With two in flight, one
    block's latency passes behind the other's bytes; more would make an urgent block wait longer.

    Wins where bytes take longer than startups, and updates may be deferred: all-reduce on a network
    that does not hide behind the backward pass.

    Differs from the paper: there is none.

    Attributes:
        least_bytes: the smallest block: below it, per-message overhead that no fitted network shows
            would dominate.
        most_bytes: the largest block.
        window_blocks: blocks in flight, the w above.
    """

    name: ClassVar[str] = "blocks"
    paper: ClassVar[str] = "none: gradlane's own"
    differs: ClassVar[str] = "-"

    tunable: ClassVar[dict[str, KnobRange]] = {"least_bytes": KnobRange(64 * 2**10, 25 * 2**20)}

    least_bytes: int = 256 * 1024
    most_bytes: int = 64 * 2**20
    window_blocks: int = 2

    def __post_init__(self) -> None:
        need_int("least_bytes", self.least_bytes, 8, MAX_BYTES)
        need_int("most_bytes", self.most_bytes, self.least_bytes, MAX_BYTES)
        need_int("window_blocks", self.window_blocks, 1, MAX_BYTES // self.most_bytes)

    def plan(self, profile: Profile, network: Network) -> Plan:
        block_bytes = self.block_bytes(profile.size_bytes, network)
        check_cuts(profile, block_bytes, "most_bytes" if block_bytes >= self.most_bytes // 8 * 8 else "least_bytes")
        urgency = profile.urgency()
        messages: list[Message] = []
        block: list[Slice] = []
        room = block_bytes
        for tensor, seen in enumerate(profile.tensors):
            if block and (seen.spec.size_bytes > room or seen.spec.dtype != profile.tensors[block[-1].tensor].spec.dtype):
                messages.append(_message(block, urgency))
                block, room = [], block_bytes
            if seen.spec.size_bytes > block_bytes:
                # cut evenly: a remainder of a few bytes would cost a whole startup
                count = -(-seen.spec.size_bytes // block_bytes)
                even_bytes = -(-seen.spec.size_bytes // (8 * count)) * 8
                messages += [_message([piece], urgency) for piece in cut(profile, tensor, even_bytes)]
            else:
                block.append(whole(profile, tensor))
                room -= seen.spec.size_bytes
        if block:
            messages.append(_message(block, urgency))
        lanes = (Lane(window_bytes=self.window_blocks * block_bytes),)
        return Plan(self.name, profile.model, profile.specs, tuple(messages), lanes, crosses_barrier=True)

    def block_bytes(self, model_bytes: int, network: Network) -> int:
        """The block size b = sqrt(a S r / w) within the limits, in bytes, a multiple of 8."""
        wanted = balanced_bytes(model_bytes, network, self.window_blocks)
        return min(max(wanted, self.least_bytes), self.most_bytes) // 8 * 8


def _message(slices: list[Slice], urgency: tuple[int, ...]) -> Message:
    return Message(tuple(slices), priority=min(urgency[piece.tensor] for piece in slices))
