"""Batching: the best merges of neighbours, given the order in which slices are sent."""

from __future__ import annotations

import numpy as np

from gradlane.core.network import Network
from gradlane.planning.schedule_problem import Group, Schedule, ScheduleProblem
from gradlane.units import NS_PER_SECOND

PIECES_AT_MOST = 1_500
ROUNDS = 12


def best_batches(problem: ScheduleProblem, order: Schedule, bound_ns: int) -> Schedule:
    """Merge neighbouring slices of an order so that the iteration is as short as possible.

    An iteration time T is possible if every message can end by T less the computation that follows
    it. Among the merges that keep T, the best for what comes later is the one whose last message
    ends first. So a dynamic programme over prefixes decides: f(j) = min over i < j of max(f(i),
    ready(i+1..j)) + cost(size of i+1..j), among those that keep T. Bisection finds T to within a
    few thousandths of the distance to `bound_ns`.

    Args:
        problem: profile and network.
        order: the slices and their order; its own merges are dissolved first.
        bound_ns: a lower bound of the iteration time.

    Returns:
        The best schedule found; `order` itself if it has more than `PIECES_AT_MOST` slices.
    """
    pieces = [problem.group([piece]) for group in order.groups for piece in group.pieces]
    if len(pieces) > PIECES_AT_MOST:
        return order
    best, low, high = order, bound_ns, order.value
    for _ in range(ROUNDS):
        if high <= low:
            break
        target = (low + high) // 2
        cuts = _cuts(pieces, problem.network, target)
        if cuts is None:
            low = target + 1
            continue
        groups = [problem.group(p for one in pieces[begin:end] for p in one.pieces) for begin, end in cuts]
        merged = Schedule(problem, groups)
        if merged.value < best.value:
            best = merged
        high = target
    return best


def _cuts(pieces: list[Group], network: Network, target_ns: int) -> list[tuple[int, int]] | None:
    """The groups, as ranges of `pieces`, that keep `target_ns`, or None if no merge does.

    Computed in floating point; the caller evaluates the result exactly.
    """
    count = len(pieces)
    sent = np.concatenate(([0.0], np.cumsum([piece.size_bytes for piece in pieces])))
    ready = np.array([piece.ready_ns for piece in pieces], dtype=np.float64)
    later = np.array([piece.later_ns for piece in pieces], dtype=np.float64)
    limits = np.array([segment.up_to_bytes for segment in network.segments[:-1]], dtype=np.float64)
    startups = np.array([segment.startup_ns for segment in network.segments], dtype=np.float64)
    byte_ns = np.array([NS_PER_SECOND / segment.bytes_per_second for segment in network.segments])
    earliest = np.full(count + 1, np.inf)
    earliest[0] = 0.0
    cut_before = [0] * (count + 1)
    begins = 0  # the run of slices of one dtype that `end` belongs to
    for end in range(1, count + 1):
        if end > 1 and pieces[end - 1].dtype != pieces[end - 2].dtype:
            begins = end - 1
        # for each begin: a group is ready when its last slice is, and the longest of its slices'
        # later_ns follows it
        ready_from = np.maximum.accumulate(ready[begins:end][::-1])[::-1]
        later_from = np.maximum.accumulate(later[begins:end][::-1])[::-1]
        sizes = sent[end] - sent[begins:end]
        which = np.searchsorted(limits, sizes)
        cost_ns = np.maximum(startups[which] + sizes * byte_ns[which], network.min_message_ns)
        ends = np.maximum(earliest[begins:end], ready_from) + cost_ns
        ends[ends + later_from > target_ns] = np.inf
        best = int(ends.argmin())
        earliest[end] = ends[best]
        cut_before[end] = begins + best
    if not np.isfinite(earliest[count]):
        return None
    cuts: list[tuple[int, int]] = []
    end = count
    while end > 0:
        cuts.append((cut_before[end], end))
        end = cut_before[end]
    return cuts[::-1]
