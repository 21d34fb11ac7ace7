"""Batching: the best merges of neighbours in a given order of pieces."""

from __future__ import annotations

import numpy as np

from gradlane.core.network import Network
from gradlane.planning.schedule_problem import Group, Schedule, ScheduleProblem
from gradlane.units import NS_PER_SECOND

PIECES_AT_MOST = 1_500
ROUNDS = 12


def best_batches(problem: ScheduleProblem, order: Schedule, bound_ns: int) -> Schedule:
    """The order's pieces, in its order, merged so that the iteration is as short as any merge of neighbours makes it.

    For a time T there is a merge that keeps it if every message can end by T less what follows it; of the merges
    that do, the one whose end is earliest leaves most to what comes behind, so that a dynamic programme over
    prefixes decides, f(j) = min over i < j of max(f(i), ready(i+1..j)) + cost(size of i+1..j), among those that keep
    T. T is found by bisection to within a few thousandths of the distance to the bound. Orders of very many pieces
    are returned as they are.
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
    """Groups as ranges of pieces with which everything keeps `target_ns`, or None. In floating point: near enough."""
    count = len(pieces)
    sent = np.concatenate(([0.0], np.cumsum([piece.size_bytes for piece in pieces])))
    ready = np.array([piece.ready_ns for piece in pieces], dtype=np.float64)
    later = np.array([piece.later_ns for piece in pieces], dtype=np.float64)
    limits = np.array([piece.up_to_bytes for piece in network.segments[:-1]], dtype=np.float64)
    startups = np.array([piece.startup_ns for piece in network.segments], dtype=np.float64)
    byte_ns = np.array([NS_PER_SECOND / piece.bytes_per_second for piece in network.segments])
    earliest = np.full(count + 1, np.inf)
    earliest[0] = 0.0
    cut_before = [0] * (count + 1)
    begins = 0  # of the run of one dtype
    for end in range(1, count + 1):
        if end > 1 and pieces[end - 1].dtype != pieces[end - 2].dtype:
            begins = end - 1
        # from each beginning to here: ready with its last piece, then follows the longest of what follows any
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
