"""Holds the lower bound against every simulator, on clusters and networks of every shape.

    python -m tests.unit.random_bounds --cases 20000           that many, from 0
    python -m tests.unit.random_bounds --from 4711 --cases 1   one

A case that fails prints what was simulated, and does the same again each time.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import msgspec
from msgspec import UNSET, UnsetType

from gradlane import policies
from gradlane.core.bus import Bus
from gradlane.core.cluster import Cluster, Host, Link, RateStep, Server, Worker
from gradlane.core.network import CostSegment, Network, Sharing
from gradlane.core.place import Place
from gradlane.core.plan import WIRES, Lane, Message, Plan, Slice
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.core.timeline import Timeline
from gradlane.planning.plans import accepted, make_plan
from gradlane.sim import simulate, simulate_servers, simulate_steady
from gradlane.sim.bounds import lower_bound_ns

ITERATIONS = 14
PERIODS = range(1, 5)


def check(seed: int) -> str:
    """Simulate the case of a seed in each way that there is for it.

    Returns:
        What kind of case it was.

    Raises `AssertionError` where an iteration takes less than the bound.
    """
    draw = random.Random(seed)
    where: Network | Cluster = network(draw) if draw.random() < 0.1 else cluster(draw)
    profile = a_profile(draw)
    plan = a_plan(draw, profile, where)
    bound_ns = lower_bound_ns(profile, where)
    if isinstance(where, Network):
        _hold(bound_ns, 0, [simulate(plan, profile, where, ITERATIONS)], f"{where}, {profile}, {plan}")
        return "all-reduce" if where.bus is UNSET else "all-reduce, bus"
    kind = "alike" if where.is_homogeneous else "uneven"
    percents = [worker.compute_percent for worker in where.workers]
    # between workers of different speeds that of the first to be ready is not that of the first to begin
    spread_ns = profile.backward_ns * (max(percents) - min(percents)) // 100
    for whole in (False, True) if where.is_homogeneous else (False,):
        timelines = simulate_servers(plan, profile, where, ITERATIONS, whole=whole)
        _hold(bound_ns, spread_ns, timelines, f"whole {whole}, {where}, {profile}, {plan}")
        shown_ns = simulate_steady(plan, profile, where, whole=whole).iteration_ns
        assert shown_ns >= bound_ns, (
            f"{shown_ns} ns are shown, the bound is {bound_ns}: whole {whole}, {where}, {profile}, {plan}"
        )
    return kind if where.bus is UNSET else f"{kind}, bus"


def _hold(bound_ns: int, spread_ns: int, timelines: Sequence[Timeline], case: str) -> None:
    begins = [[span.start_ns for span in timeline.spans if span.kind == "backward"] for timeline in timelines]
    for first in range(ITERATIONS - 1):
        took_ns = max(of_rank[-1] for of_rank in begins) - min(of_rank[first] for of_rank in begins)
        count = ITERATIONS - 1 - first
        assert took_ns + spread_ns >= count * bound_ns, f"{count} iterations take {took_ns} ns, the bound is {bound_ns}: {case}"
    steady = steady_ns(begins)
    assert steady is None or steady >= bound_ns, f"a steady iteration takes {float(steady)} ns, the bound is {bound_ns}: {case}"


def steady_ns(begins: Sequence[Sequence[int]]) -> Fraction | None:
    """The mean iteration where the last ones repeat, from the start of each rank's backward passes; else None."""
    for period in PERIODS:
        moved = {last[-1 - back] - last[-1 - back - period] for last in begins for back in range(2 * period)}
        if len(moved) == 1:
            return Fraction(moved.pop(), period)
    return None


def network(draw: random.Random) -> Network:
    """One of up to three segments, also with a bus, whose messages may be in flight together."""
    limits = sorted(draw.sample(range(1_000, 400_000), draw.randint(0, 2)))
    segments = []
    for limit in (*limits, None):
        startup_ns = draw.choice((0, 30_000, 300_000))
        segments.append(CostSegment(startup_ns, _rate(draw), *(() if limit is None else (limit,)), latency_ns=startup_ns // 3))
    bus = _bus(draw) if draw.random() < 0.5 else UNSET
    workers = draw.randint(1, 8) * (1 if bus is UNSET else bus.devices)
    sharing = Sharing(draw.randint(2, 4), draw.randint(1, 4)) if draw.random() < 0.5 else Sharing()
    return Network(workers, tuple(segments), sharing=sharing, bus=bus, start_ns=draw.choice((0, 0, 40_000)))


def cluster(draw: random.Random) -> Cluster:
    """One of any shape: hosts that are alike or not, servers on them or elsewhere, with and without a bus."""
    has_bus = draw.random() < 0.25
    if draw.random() < 0.5:
        made = _of_equal_hosts(draw, _bus(draw) if has_bus else UNSET)
    else:
        made = _of_any_hosts(draw, _bus(draw) if has_bus else UNSET)
    return msgspec.structs.replace(
        made,
        startup_ns=draw.choice((0, 0, 20_000)),
        sum_bytes_per_second=draw.choice((None, None, 10**9)),
        update_bytes_per_second=draw.choice((None, None, None, 10**9)),
        network_classes=draw.choice((1, 2)),
        packet_bytes=draw.choice((30_000, 30_000, 2_000)),
    )


def _of_equal_hosts(draw: random.Random, bus: Bus | UnsetType) -> Cluster:
    devices = draw.choice((1, 1, 2, 3, 4)) if bus is UNSET else bus.devices
    hosts, colocated = draw.randint(1, 4), draw.random() < 0.6
    servers = hosts if colocated and draw.random() < 0.8 else draw.randint(1, hosts if colocated else 4)
    return Cluster.homogeneous(hosts * devices, servers, _rate(draw), colocated=colocated, devices=devices, bus=bus)


def _of_any_hosts(draw: random.Random, bus: Bus | UnsetType) -> Cluster:
    hosts = tuple(Host(_link(draw), _link(draw)) for _ in range(draw.randint(1, 5)))
    places = range(len(hosts))
    on = [draw.choice(places) for _ in range(draw.randint(1, 6))]
    if bus is not UNSET:
        on = [place for place in draw.sample(places, draw.randint(1, len(hosts))) for _ in range(bus.devices)]
    workers = tuple(Worker(place, draw.choice((100, 100, 150, 300))) for place in on)
    servers = tuple(Server(draw.choice(places), draw.choice((1, 1, 1, 3))) for _ in range(draw.randint(1, 4)))
    return Cluster(hosts, workers, servers, bus=bus)


def _rate(draw: random.Random) -> int:
    return draw.choice((10**8, 3 * 10**8, 10**9, 10**9, draw.randint(10**7, 10**10)))


def _link(draw: random.Random) -> Link:
    steps = sorted(draw.sample(range(1, 10**6), draw.choice((0, 0, 0, 1))))
    return Link(_rate(draw), tuple(RateStep(at_ns, _rate(draw)) for at_ns in steps))


def _bus(draw: random.Random) -> Bus:
    return Bus(draw.choice((2, 3, 4)), draw.choice((0, 5_000)), _rate(draw), draw.choice((1_000, 2**20)))


def a_profile(draw: random.Random) -> Profile:
    """Up to six tensors, of a few bytes or some packets, on times from none to what they take on the wire."""
    count, most_bytes = draw.randint(1, 6), draw.choice((200, 5_000, 60_000, 200_000))
    gap_ns = draw.choice((0, 1_000, 100_000, 1_000_000))
    layers = draw.randint(1, count)
    tensors, ready_ns = [], 0
    for index in range(count):
        ready_ns += draw.randint(0, gap_ns)
        layer = draw.choice((layers - 1 - index * layers // count, draw.randrange(layers)))
        tensors.append(TensorProfile(TensorSpec(f"t{index}", 4 * draw.randint(1, most_bytes // 4)), ready_ns, layer))
    times = [(draw.randint(0, gap_ns), draw.choice((0, draw.randint(0, gap_ns)))) for _ in range(layers)]
    return Profile(
        "drawn",
        "none",
        tuple(tensors),
        tuple(Layer(f"l{index}", *each) for index, each in enumerate(times)),
        ready_ns + draw.choice((0, draw.randint(0, gap_ns))),
    )


def a_plan(draw: random.Random, profile: Profile, where: Network | Cluster) -> Plan:
    """A policy's, or one that cuts and merges as no policy would, into many very small messages too."""
    place = Place.of(where)
    if draw.random() < 0.5:
        names = policies.names(place.backend, place.has_external_servers, place.network.bus is not UNSET)
        return make_plan(policies.get(draw.choice(names)), profile, place)
    most_cuts = draw.choice((0, 1, 3, 20))
    pieces: list[Slice] = []
    for index, spec in enumerate(profile.specs):
        cuts = {4 * draw.randint(1, spec.size_bytes // 4) for _ in range(draw.randint(0, most_cuts))}
        edges = sorted({0, spec.size_bytes, *cuts})
        pieces += [Slice(index, start, end - start) for start, end in itertools.pairwise(edges)]
    draw.shuffle(pieces)
    urgency, messages = profile.urgency(), []
    while pieces:
        count = draw.choice((1, 1, 2, 3))
        taken, pieces = pieces[:count], pieces[count:]
        priority = draw.choice((min(urgency[piece.tensor] for piece in taken), draw.randint(0, 3)))
        messages.append(Message(tuple(taken), priority, draw.randrange(2)))
    lanes = (Lane(draw.choice((None, None, 10_000))), Lane(None, 1))
    wire = "fifo" if place.backend == "all-reduce" else draw.choice(WIRES)
    plan = Plan("drawn", profile.model, profile.specs, tuple(messages), lanes, wire, crosses_barrier=draw.random() < 0.8)
    return accepted(plan, profile, place)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.unit.random_bounds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=2000, metavar="NUMBER", help="how many (2000)")
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="SEED", help="the first (0)")
    options = parser.parse_args()
    kinds, failed = Counter[str](), 0
    for seed in range(options.first, options.first + options.cases):
        if (seed - options.first) % 1000 == 999:
            print(f"{seed - options.first + 1} of {options.cases}", file=sys.stderr, flush=True)
        try:
            kinds[check(seed)] += 1
        except AssertionError as error:
            failed += 1
            print(f"case {seed}: {error}")
    print(f"{options.cases} cases, {failed} below the bound; {', '.join(f'{kinds[kind]} {kind}' for kind in sorted(kinds))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
