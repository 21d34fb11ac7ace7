"""MG-WFBP, exact: the best merge of neighbours under the paper's model."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import ClassVar

import msgspec
import numpy as np

from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.policy import merge
from gradlane.core.profile import Profile
from gradlane.errors import InputError
from gradlane.units import NS_PER_SECOND

_MOST_TENSORS = 2_000  # a tenth of a second


class MgWfbpExact(msgspec.Struct, frozen=True):
    """The merge whose last message arrives first, by dynamic programming over prefixes.

    With f(j) the earliest time at which the first j gradients have arrived, f(j) = min over i < j
    of max(f(i), ready(j)) + cost(size of i+1..j); O(L^2) evaluations.

    Wins where `mg-wfbp` does, by a little more: under the paper's model it is never behind.

    Differs from the paper: it replaces the greedy rule of Eq. 38, which Theorem 1 calls optimal.
    Three layers refute that: gradients ready at 0, 1 and 100, of 100, 1 and 1 units, with a = 50
    and b = 1.
    """

    name: ClassVar[str] = "mg-wfbp-exact"
    paper: ClassVar[str] = "MG-WFBP (TPDS '21) Eq. 7, 8, 10, its problem solved exactly"
    differs: ClassVar[str] = "dynamic programme over prefixes in place of the greedy rule"

    def plan(self, profile: Profile, network: Network) -> Plan:
        if len(profile.tensors) > _MOST_TENSORS:
            raise InputError(
                f"mg-wfbp-exact: got {len(profile.tensors)} tensors, expected at most {_MOST_TENSORS}: time grows with their "
                "square; mg-wfbp plans any number"
            )
        groups = merge_exactly(profile, network)
        messages = tuple(message for group in groups for message in merge(profile, group))
        return Plan(self.name, profile.model, profile.specs, messages)


def merge_exactly(profile: Profile, network: Network) -> list[list[int]]:
    """Group tensors so that the last group arrives as early as possible.

    Returns:
        Groups of tensor indices, in readiness order.
    """
    count = len(profile.tensors)
    sent_bytes = [0, *accumulate(seen.spec.size_bytes for seen in profile.tensors)]
    most_ns = profile.tensors[-1].ready_ns + count * sum(segment.cost_ns(sent_bytes[-1]) for segment in network.segments)
    integer = np.int64 if most_ns < 2**62 else object  # Python's own, for the slowest of networks
    # by segment the time of all bytes so far: whole ns, and what is left, since it does not fit 64 bits by itself
    times = [
        np.array([divmod(each * NS_PER_SECOND, segment.bytes_per_second) for each in sent_bytes], dtype=integer).T
        for segment in network.segments
    ]
    earliest = np.zeros(count + 1, dtype=integer)
    cut_before = [0] * (count + 1)
    run_begins = 0
    for end in range(1, count + 1):
        ready_ns = profile.tensors[end - 1].ready_ns
        # a message is one sum and has one dtype, so no group contains two
        if end > 1 and profile.tensors[end - 1].spec.dtype != profile.tensors[end - 2].spec.dtype:
            run_begins = end - 1
        begins = np.maximum(earliest[run_begins:end], ready_ns)
        # the groups whose size belongs to a segment are neighbours: `Network.cost_ns` for all of them at once
        cost_ns = np.empty(end - run_begins, dtype=integer)
        upto = end
        for segment, (whole, rest) in zip(network.segments, times, strict=True):
            first = bisect_left(sent_bytes, sent_bytes[end] - segment.up_to_bytes, run_begins, upto)
            rounded_up = rest[first:upto] < rest[end]
            taken_ns = whole[end] - whole[first:upto] + rounded_up
            cost_ns[first - run_begins : upto - run_begins] = taken_ns + segment.startup_ns
            upto = first
        ends = begins + np.maximum(cost_ns, network.min_message_ns)
        # ties go to the earliest cut: fewer messages
        best = int(ends.argmin())
        earliest[end] = ends[best]
        cut_before[end] = run_begins + best
    groups: list[list[int]] = []
    end = count
    while end > 0:
        groups.append(list(range(cut_before[end], end)))
        end = cut_before[end]
    return groups[::-1]
