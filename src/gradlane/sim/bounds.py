"""Bounds: what no schedule can beat, to stand beside every simulated time.

The oracle has no communication at all; linear scaling is that of `workers` times its speed. The
lower bound knows the network too: when gradients are ready, which layer first needs which, startup
and bandwidth.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate

import msgspec
import numpy as np
from msgspec import UNSET

from gradlane.core.bus import Stage
from gradlane.core.cluster import Cluster, Worker
from gradlane.core.network import Network
from gradlane.core.profile import Profile
from gradlane.sim.passes import tensors_by_layer
from gradlane.sim.server_bounds import ServerBounds
from gradlane.units import NS_PER_SECOND

LAYERS_AT_MOST = 2_000
MERGED_LAYERS_AT_MOST = 24


def oracle_ns(profile: Profile) -> int:
    """The time of an iteration of one worker alone, in ns (Mercury Eq. 9)."""
    return profile.compute_ns


def efficiency(profile: Profile, iteration_ns: int) -> float:
    """The part of linear scaling that an iteration time reaches.

    Args:
        profile: the iteration's computation.
        iteration_ns: the time that it takes with communication.

    Returns:
        0 to 1; 1 where the iteration takes no time.
    """
    return profile.compute_ns / iteration_ns if iteration_ns else 1.0


def lower_bound_ns(profile: Profile, where: Network | Cluster) -> int:
    """A time that no plan's steady, synchronous iteration goes below, whatever the plan merges,
    cuts or reorders.

    Args:
        profile: one iteration's computation.
        where: a network for all-reduce, or a cluster with parameter servers.

    Returns:
        Nanoseconds.

    Argument. Let R be a time after the start of backward and k a layer. The gradients that are ready at R or later and whose
    parameters are first used by layer k or one before it can be sent only from R on. Together they are S bytes, in at least one
    message, and the network needs at least c(S) for them, its cheapest way to carry S bytes. One of these gradients therefore
    arrives at R + c(S) or later. Its layer is k or one before it, so layer k and all behind it, each with its update, run after
    that. The forward pass ends no sooner than the greatest R + c(S) + (updates and layers from k on) over all R and k. Nor does
    it end sooner than backward, forward and the uncovered time take alone.

    For all-reduce c(S) is that of the cheapest piece of the network to carry S bytes in. It has one
    startup, and the largest size that the piece allows at its rate. What is left takes the least time
    per byte that any message has, its startup spread over the largest size of its piece. No startup
    where messages overlap, since it may pass behind other messages' bytes, but never less than one
    whole startup. That S bytes are ready at different times, and a
    message takes only what is, tells more: `_all_arrive_ns` in place of R + c(S), for some of the
    layers k.

    On a cluster workers may begin an iteration at different times, and those of a host share its links, so that R is not one
    time. The argument holds for some groups of workers, each with its own c(S) (`server_bounds`). The bound is the greatest of
    their bounds and of the time that the busiest link needs for an iteration's bytes.

    Where hosts have several devices, the first of the S bytes is between hosts one startup of the first stage after R, or
    later. From then on, c(S) is that of the network between hosts. Or else the last stage has the most to do. It takes messages
    one after another, each after the startups of the other stages, and all S bytes pass it.
    """
    if isinstance(where, Network):
        cost, between = _all_reduce_cost(where.between), where.between
        if where.bus is not UNSET:
            least_ns = min(segment.startup_ns for segment in between.segments)
            cost = _within_hosts(cost, least_ns, where.bus.reduce_scatter, where.bus.all_gather)
        return max(_bound(profile, cost, 100, True), _bound_by_merges(profile, where))
    updates_here = where.update_bytes_per_second is None
    servers = ServerBounds(_senders(where), profile.size_bytes)
    best = servers.link_ns()
    for group in servers.groups():
        cost = group.cost_ns
        if where.bus is not UNSET:
            cost = _within_hosts(cost, 0, where.bus.broadcast, where.bus.broadcast)
        best = max(best, _bound(profile, cost, group.compute_percent, updates_here))
    return best


def _senders(cluster: Cluster) -> Cluster:
    """The cluster between hosts, with a worker for each sender, as fast as the slowest device of its host."""
    if cluster.bus is UNSET:
        return cluster
    slowest: dict[int, int] = {}
    for worker in cluster.workers:
        slowest[worker.host] = max(worker.compute_percent, slowest.get(worker.host, 0))
    return msgspec.structs.replace(cluster.between, workers=tuple(Worker(host, percent) for host, percent in slowest.items()))


def _within_hosts(between: Callable[[int], int], least_ns: int, enter: Stage, leave: Stage) -> Callable[[int], int]:
    """The cost c(S) of a path whose second stage has the cost `between`, and is passed in `least_ns`
    or more.
    """

    def cost_ns(size_bytes: int) -> int:
        last_ns = least_ns + leave.startup_ns + leave.bytes_ns(size_bytes)
        return enter.startup_ns + max(between(size_bytes), last_ns)

    return cost_ns


def _all_reduce_cost(network: Network) -> Callable[[int], int]:
    """c(S) of `lower_bound_ns`.

    Some piece has a message, with x > 0 of the S bytes in it. These take its startup and x at its
    rate, and all other bytes the least time per byte or more. The sum is least where x is what one
    message of the piece takes, or next to nothing where the piece's own bytes take longer than that.
    """
    alone_ns = max(network.min_message_ns, min(piece.startup_ns for piece in network.segments))
    byte_ns = _least_byte_ns(network)
    pieces = [
        (network.occupied_ns(piece), piece.bytes_per_second, piece.up_to_bytes)
        if Fraction(NS_PER_SECOND, piece.bytes_per_second) <= byte_ns
        else (network.occupied_ns(piece), piece.bytes_per_second, 0)
        for piece in network.segments
    ]

    def cost_ns(size_bytes: int) -> int:
        cheapest = -1
        for startup_ns, bytes_per_second, up_to_bytes in pieces:
            inside = size_bytes if size_bytes < up_to_bytes else up_to_bytes
            cost = startup_ns - -inside * NS_PER_SECOND // bytes_per_second
            if inside < size_bytes:
                cost += (size_bytes - inside) * byte_ns.numerator // byte_ns.denominator
            if cheapest < 0 or cost < cheapest:
                cheapest = cost
        return max(alone_ns, cheapest)

    return cost_ns


def _least_byte_ns(network: Network) -> Fraction:
    """No message takes less time than this for each of its bytes."""
    return min(
        Fraction(NS_PER_SECOND, piece.bytes_per_second) + Fraction(network.occupied_ns(piece), piece.up_to_bytes)
        for piece in network.segments
    )


def _lines_below(network: Network, most_bytes: int) -> set[tuple[int, int]]:
    """Startups in ns with rates in bytes per second: no message of up to `most_bytes` costs less than
    any of them says. They are the edges of the costs' convex hull from below, the least time per
    byte, and the least startup with the highest rate.
    """
    pieces = [(network.occupied_ns(piece), piece.bytes_per_second, piece.up_to_bytes) for piece in network.segments]
    lines = {(min(startup_ns for startup_ns, _, _ in pieces), max(rate for _, rate, _ in pieces))}
    if len(pieces) == 1:
        return lines
    lines.add((0, _rate(_least_byte_ns(network))))
    hull: list[tuple[int, Fraction]] = []  # corners, (size_bytes, cost_ns)
    least_bytes = 0
    for startup_ns, bytes_per_second, up_to_bytes in pieces:
        for size_bytes in (least_bytes, min(up_to_bytes, most_bytes)):
            corner = (size_bytes, startup_ns + Fraction(size_bytes * NS_PER_SECOND, bytes_per_second))
            if hull and hull[-1][0] == size_bytes:
                corner = min(corner, hull.pop())
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], corner):
                hull.pop()
            hull.append(corner)
        if up_to_bytes >= most_bytes:
            break
        least_bytes = up_to_bytes
    for before, corner in itertools.pairwise(hull):
        slope = _slope(before, corner)
        startup = corner[1] - slope * corner[0]
        if slope > 0 and startup >= 0:
            lines.add((math.floor(startup), _rate(slope)))
    return lines


def _slope(before: tuple[int, Fraction], after: tuple[int, Fraction]) -> Fraction:
    return (after[1] - before[1]) / (after[0] - before[0])


def _rate(byte_ns: Fraction) -> int:
    """In bytes per second, rounded up."""
    return math.ceil(NS_PER_SECOND / byte_ns)


def _bound_by_merges(profile: Profile, network: Network) -> int:
    """The greatest, over some layers k, of the earliest time when all gradients of layers up to k
    have arrived, and the time of the layers from k on.
    """
    between = network.between
    # of a stage: when it is reached at the earliest, and what each message takes of it alone
    stages = [(0, *line) for line in _lines_below(between, profile.size_bytes)]
    if network.bus is not UNSET:
        before, stage = network.bus.reduce_scatter.startup_ns, network.bus.all_gather
        least_ns = min(piece.startup_ns for piece in between.segments)
        stages = [(before, *line[1:]) for line in stages]
        overhead_ns = stage.startup_ns - stage.latency_ns
        stages.append((before + least_ns + stage.latency_ns, overhead_ns, stage.bytes_per_second))
    count = len(profile.layers)
    every = -(-count // MERGED_LAYERS_AT_MOST)
    rest = [0] * (count + 1)
    for index in range(count - 1, -1, -1):
        rest[index] = rest[index + 1] + profile.layers[index].forward_ns + profile.layers[index].update_ns
    best = 0
    for index in range(count - 1, -1, -every):
        used = [(tensor.ready_ns, tensor.spec.size_bytes) for tensor in profile.tensors if tensor.layer <= index]
        if used:
            arrive_ns = max(before_ns + _all_arrive_ns(used, alone_ns, rate) for before_ns, alone_ns, rate in stages)
            best = max(best, arrive_ns + rest[index])
    return best


def _all_arrive_ns(gradients: list[tuple[int, int]], startup_ns: int, bytes_per_second: int) -> int:
    """No schedule has all of `gradients`, (ready_ns, size_bytes) in order of readiness, sent before
    this time.

    Messages cost a startup and their bytes, one after another, and start when all they carry is
    ready. Let any schedule be given. Its messages in order of their latest gradient end no later
    than they did, interrupted or not. Filled with the bytes in order of readiness, they still carry
    only what is ready. A gradient that two of them share can go with the first. What is left are
    merges of neighbours, whose best is f(j) = min over i < j of max(f(i), ready(j)) + startup +
    bytes(i+1 .. j). As f never falls, among the i with f(i) <= ready(j) the last is the best, and
    the others pass through a window that only moves on: O(n).
    """
    # in units of 1 ns / bytes_per_second, so that all are integers
    startup = startup_ns * bytes_per_second
    ends, before = [0], [0]  # f(i), and the time of the bytes before i + 1
    window: deque[int] = deque()  # i with f(i) > ready(j), by ascending f(i) - before(i)
    last_free = 0  # the last i with f(i) <= ready(j)
    for ready_ns, size_bytes in gradients:
        ready = ready_ns * bytes_per_second
        while last_free + 1 < len(ends) and ends[last_free + 1] <= ready:
            last_free += 1
        while window and window[0] <= last_free:
            window.popleft()
        sent = before[-1] + size_bytes * NS_PER_SECOND
        end = ready + sent - before[last_free]
        if window:
            end = min(end, ends[window[0]] + sent - before[window[0]])
        newest = len(ends)
        ends.append(end + startup)
        before.append(sent)
        while window and ends[window[-1]] - before[window[-1]] >= ends[newest] - before[newest]:
            window.pop()
        window.append(newest)
    return -(-ends[-1] // bytes_per_second)


def _bound(profile: Profile, cost_ns: Callable[[int], int], percent: int, updates_here: bool) -> int:
    layers = [
        layer.forward_ns * percent // 100 + (layer.update_ns * percent // 100 if updates_here else 0)
        for layer in profile.layers
    ]
    ready = [tensor.ready_ns * percent // 100 for tensor in profile.tensors]
    best = profile.backward_ns * percent // 100 + profile.uncovered_ns * percent // 100 + sum(layers)
    of_layers = tensors_by_layer(profile)
    latest_first = [*reversed(profile.tensors)]
    ready_last = np.array(ready[::-1], dtype=np.int64)
    bytes_last = np.array([tensor.spec.size_bytes for tensor in latest_first], dtype=np.int64)
    layer_last = np.array([tensor.layer for tensor in latest_first])
    rest = 0
    # every layer gives a bound; of very many, some do
    every = -(-len(layers) // LAYERS_AT_MOST)
    for index in range(len(layers) - 1, -1, -1):
        rest += layers[index]
        if of_layers[index] and index % every == 0:
            # R and S of each choice of R, those with the least S first
            used = layer_last <= index
            times: list[int] = ready_last[used].tolist()
            sizes = list(accumulate(bytes_last[used].tolist()))
            best = rest + _greatest(times, sizes, cost_ns, best - rest)
    return best


def _greatest(times: list[int], sizes: list[int], cost_ns: Callable[[int], int], least: int) -> int:
    """The greatest of `times[i] + cost_ns(sizes[i])`, or `least` if none is greater.

    By halves: no choice of a part is greater than its latest time with its largest size.

    Args:
        times: falling.
        sizes: rising, as `cost_ns` does with them.
        cost_ns: as in `lower_bound_ns`.
        least: see above.
    """
    parts = [(0, len(times))]
    while parts:
        begin, end = parts.pop()
        cost = cost_ns(sizes[end - 1])
        if times[begin] + cost <= least:
            continue
        least = max(least, times[end - 1] + cost)
        if end - begin > 1:
            middle = (begin + end) // 2
            parts += ((begin, middle), (middle, end))
    return least
