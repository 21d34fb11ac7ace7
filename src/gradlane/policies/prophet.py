"""Prophet: blocks that end before a more urgent gradient is ready; the rest goes after backward."""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from typing import ClassVar

import msgspec

from gradlane.core.fields import MAX_BYTES, need_int
from gradlane.core.network import Network
from gradlane.core.plan import Lane, Message, Plan, Slice, Wire
from gradlane.core.policy import SIZES, KnobRange, check_cuts, cut
from gradlane.core.profile import Profile
from gradlane.core.stepwise import stepwise


class Prophet(msgspec.Struct, frozen=True):
    """At each step, send what ends before a more urgent gradient is ready (Algorithm 1).

    Ready gradients are cut into partitions, and the most urgent ones form a block as long as it
    ends in time on the worker's own link (§3.1). Over servers a partition is pulled when it has been pushed
    itself, and not when its block has (Eq. 4). Partitions that fit no block are held until the backward pass ends, then go by
    priority, one at a time.

    Wins where gradients become ready in few steps, far apart, and a startup is short. Its
    partitions go one at a time, each with a startup, so that it falls behind elsewhere.

    Differs from the paper: there gradient 0 ends the backward phase; here the last gradient to become ready does. E(i) of Eq. 5
    is the cost of the whole block so far, so a block pays one startup. Steps (§2.2) are found in the profile's times
    (`core.stepwise`), as measured times are never equal. The paper's monitor measures the bandwidth every 5 s (§4.2); here rank
    0 alone follows it in the messages that are sent anyway. It plans again if bandwidth or times have changed by a factor of
    1.4 and steps take 5 % longer or shorter. In Algorithm 1 each worker has its own plan; here all have one.

    Attributes:
        partition_bytes: the largest partition.
    """

    name: ClassVar[str] = "prophet"
    paper: ClassVar[str] = "Prophet (ICPP '21) Algorithm 1"
    differs: ClassVar[str] = (
        "the backward phase ends with the last gradient; a block pays startup once; rank 0 alone plans, for all, and again "
        "where bandwidth or times changed by a factor of 1.4 and steps by 5 %"
    )

    wire_over_servers: ClassVar[Wire] = "packet-fifo"  # Eq. 4
    replans: ClassVar[bool] = True  # §4.2: once profiled times repeat themselves, and again when the bandwidth has changed
    tunable: ClassVar[dict[str, KnobRange]] = {"partition_bytes": SIZES}

    partition_bytes: int = 4_096_000

    def __post_init__(self) -> None:
        need_int("partition_bytes", self.partition_bytes, 8, MAX_BYTES)

    def plan(self, profile: Profile, network: Network) -> Plan:
        check_cuts(profile, self.partition_bytes, "partition_bytes")
        network = network.own_links
        profile = stepwise(profile)
        urgency = profile.urgency()
        tensors = profile.tensors
        overtaken = _overtaken_ns(profile, urgency)
        messages: list[Message] = []
        pool: list[tuple[int, int, Slice]] = []  # partitions that are ready: (urgency, offset, partition)
        steps = sorted({seen.ready_ns for seen in tensors})
        arriving, free_ns = 0, 0
        for now_ns in steps[:-1]:
            while tensors[arriving].ready_ns == now_ns:
                for piece in cut(profile, arriving, self.partition_bytes):
                    heapq.heappush(pool, (urgency[arriving], piece.offset_bytes, piece))
                arriving += 1
            start_ns = max(now_ns, free_ns)
            block: list[Slice] = []
            block_bytes = 0
            while pool:  # lines 7 to 11
                piece = pool[0][2]
                end_ns = start_ns + network.cost_ns(block_bytes + piece.size_bytes)
                # one sum has one dtype, so another dtype begins the next block
                if end_ns > overtaken[piece.tensor] or (
                    block and tensors[piece.tensor].spec.dtype != tensors[block[0].tensor].spec.dtype
                ):
                    break
                heapq.heappop(pool)
                block.append(piece)
                block_bytes += piece.size_bytes
                free_ns = end_ns
            if block:
                first = min(urgency[piece.tensor] for piece in block)
                messages.append(Message(_joined(block), first, hold_until=arriving - 1))
        last = len(tensors) - 1
        for tensor in range(arriving, last + 1):
            for piece in cut(profile, tensor, self.partition_bytes):
                heapq.heappush(pool, (urgency[tensor], piece.offset_bytes, piece))
        rest = _joined([heapq.heappop(pool)[2] for _ in range(len(pool))])  # lines 13 to 18
        messages += [Message((piece,), urgency[piece.tensor], hold_until=last) for piece in rest]
        # a window of one byte allows one message at a time, since a lone larger one may always go
        # (Constraint 8)
        lanes = (Lane(window_bytes=1),)
        return Plan(self.name, profile.model, profile.specs, tuple(messages), lanes, crosses_barrier=True)


def _overtaken_ns(profile: Profile, urgency: tuple[int, ...]) -> list[int]:
    """For each tensor, when the next more urgent gradient is ready: c(i) + A(i) of line 1."""
    times = [profile.backward_ns] * len(urgency)
    # A stack of later gradients, the next one on top. One that is less urgent than an earlier one
    # has no effect.
    ranks: list[int] = []
    ready: list[int] = []
    tensors = range(len(urgency) - 1, -1, -1)
    for ready_ns, group in itertools.groupby(tensors, key=lambda tensor: profile.tensors[tensor].ready_ns):
        together = list(group)
        for tensor in together:
            place = bisect_left(ranks, urgency[tensor])
            if place:
                times[tensor] = ready[place - 1]
        most_urgent = min(urgency[tensor] for tensor in together)
        while ranks and ranks[-1] > most_urgent:
            ranks.pop()
            ready.pop()
        ranks.append(most_urgent)
        ready.append(ready_ns)
    return times


def _joined(pieces: list[Slice]) -> tuple[Slice, ...]:
    """Join neighbouring partitions of one tensor into one slice."""
    joined: list[Slice] = []
    for piece in pieces:
        if joined and joined[-1].tensor == piece.tensor:
            before = joined.pop()
            joined.append(Slice(piece.tensor, before.offset_bytes, before.size_bytes + piece.size_bytes))
        else:
            joined.append(piece)
    return tuple(joined)
