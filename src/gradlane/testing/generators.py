"""Generators: hypothesis strategies for profiles, networks, clusters, plans that no policy would
make, and jobs that carry them out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure
from msgspec import UNSET, UnsetType, structs

from gradlane import policies
from gradlane.core.bus import Bus
from gradlane.core.cluster import Cluster, Host, Link, RateStep, Server, Worker
from gradlane.core.fields import MAX_BYTES
from gradlane.core.network import CostSegment, Network, Sharing
from gradlane.core.place import Place
from gradlane.core.plan import WIRES, Lane, Message, Plan, Slice, Wire
from gradlane.core.profile import DTYPE_BYTES, Layer, Profile, TensorProfile, TensorSpec
from gradlane.sim import planned_ahead
from gradlane.sim.fabric import Job

# many zeros: gradients of one layer become ready together
GAPS_NS = st.one_of(st.just(0), st.integers(0, 50), st.integers(0, 3_000_000))


def holds_for(examples: int, check: Callable[..., None], **drawn: st.SearchStrategy[Any]) -> None:
    """Call `check` with values drawn from each strategy of `drawn`, by the name of its argument.

    Args:
        examples: calls, 1 or more.
        check: raises `AssertionError` for values that break the promise.
        drawn: a strategy for each argument of `check`.

    Raises what `check` raises for the smallest values found, with those values in a note; also
    where it raises that for the same values now and then. How values are chosen, the loaded
    hypothesis profile says; how long drawing takes on a busy machine is no failure.
    """
    limits = settings(
        max_examples=examples,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
        phases=set(Phase) - {Phase.explain},  # which takes longer than all others
    )
    try:
        limits(given(**drawn)(check))()
    except FlakyFailure as error:
        raise error.exceptions[0] from error


@st.composite
def profiles(
    draw: st.DrawFn,
    max_tensors: int = 40,
    dtypes: Sequence[str] = tuple(DTYPE_BYTES),
    max_elements: int = 200_000,
) -> Profile:
    """Any profile: tensors in readiness order, each first used by some layer, layers without
    tensors too, with uncovered time or without.

    Args:
        max_tensors: tensors at most, 1 or more.
        dtypes: candidates for each tensor's dtype.
        max_elements: elements of one tensor at most.
    """
    count = draw(st.integers(1, max_tensors))
    gaps = draw(st.lists(GAPS_NS, min_size=count, max_size=count))
    elements = draw(st.lists(st.integers(1, max_elements), min_size=count, max_size=count))
    of_dtype = draw(st.lists(st.sampled_from(dtypes), min_size=count, max_size=count))
    layers = draw(st.lists(st.tuples(GAPS_NS, GAPS_NS), min_size=1, max_size=count))
    used_by = draw(st.lists(st.integers(0, len(layers) - 1), min_size=count, max_size=count))
    tensors: list[TensorProfile] = []
    ready_ns = 0
    for index in range(count):
        ready_ns += gaps[index]
        spec = TensorSpec(f"t{index}", elements[index] * DTYPE_BYTES[of_dtype[index]], of_dtype[index])
        tensors.append(TensorProfile(spec, ready_ns, used_by[index]))
    return Profile(
        "drawn",
        "none",
        tuple(tensors),
        tuple(Layer(f"l{index}", forward, update) for index, (forward, update) in enumerate(layers)),
        ready_ns + draw(GAPS_NS),
        uncovered_ns=draw(GAPS_NS),
    )


@st.composite
def networks(draw: st.DrawFn, overlapping: bool = True, starting: bool = True) -> Network:
    """Any network of 2 to 64 workers and one or two segments, with messages of next to nothing that
    cost what they cost.

    Args:
        overlapping: whether messages may also be in flight together; otherwise they pass one after
            another.
        starting: whether to start a message may also take time from computing.
    """
    sharing = Sharing()
    if overlapping and draw(st.booleans()):
        sharing = Sharing(
            draw(st.integers(1, 4)),
            draw(st.integers(1, 6)),
            draw(st.sampled_from((10_000, MAX_BYTES))),
            draw(st.sampled_from((1, 8))),
        )
    segments: list[CostSegment] = []
    startup_ns, rate = draw(st.integers(0, 2_000_000)), draw(st.integers(10**6, 10**11))
    segments.append(CostSegment(startup_ns, rate, latency_ns=draw(st.integers(0, startup_ns)) if overlapping else 0))
    if draw(st.booleans()):
        startup_ns, rate = draw(st.integers(0, 500_000)), draw(st.integers(10**6, 10**11))
        latency_ns = draw(st.integers(0, startup_ns)) if overlapping else 0
        segments.insert(0, CostSegment(startup_ns, rate, draw(st.integers(1, 10**6)), latency_ns))
    min_message_ns = draw(st.sampled_from((0, 0, 300_000, 3_000_000)))
    return Network(
        draw(st.integers(2, 64)),
        tuple(segments),
        sharing=sharing,
        min_message_ns=min_message_ns,
        min_message_latency_ns=draw(st.integers(0, min_message_ns)),
        start_ns=draw(st.sampled_from((0, 0, 40_000))) if starting else 0,
        wakeup_ns=draw(st.sampled_from((0, 0, 90_000))) if starting else 0,
    )


@st.composite
def buses(draw: st.DrawFn) -> Bus:
    """Any bus of 2 to 8 devices on each host, slower than most networks or faster."""
    packet_bytes, startup_ns = draw(st.sampled_from((1_000, 100_000, 2**20))), draw(st.integers(0, 20_000))
    return Bus(
        draw(st.integers(2, 8)), startup_ns, draw(st.integers(10**7, 10**12)), packet_bytes,
        latency_ns=draw(st.integers(0, startup_ns)),
    )  # fmt: skip


@st.composite
def hosted_networks(draw: st.DrawFn) -> Network:
    """Any network of 1 to 64 hosts with several devices each."""
    between, bus = draw(networks()), draw(buses())
    return structs.replace(between, workers=draw(st.integers(1, 64)) * bus.devices, bus=bus)


@st.composite
def plans(draw: st.DrawFn, max_lanes: int = 3, sequenced: bool | None = None) -> Plan:
    """Any valid plan: tensors cut and put together at random, held back, over several lanes.

    Args:
        max_lanes: lanes at most, 1 or more.
        sequenced: whether the plan fixes the order of its messages; None: either.
    """
    count = draw(st.integers(1, 8))
    specs = tuple(TensorSpec(f"t{index}", 4 * draw(st.integers(1, 12))) for index in range(count))
    pieces: list[Slice] = []
    for index, spec in enumerate(specs):
        cuts = draw(st.sets(st.integers(1, spec.size_bytes // 4), max_size=3))
        edges = sorted({0, spec.size_bytes, *(4 * cut for cut in cuts)})
        pieces += [Slice(index, start, end - start) for start, end in itertools.pairwise(edges)]
    pieces = draw(st.permutations(pieces))
    lanes = tuple(
        Lane(window) for window in draw(st.lists(st.one_of(st.none(), st.integers(1, 60)), min_size=1, max_size=max_lanes))
    )
    messages: list[Message] = []
    while pieces:
        taken = draw(st.integers(1, min(3, len(pieces))))
        held = draw(st.one_of(st.none(), st.integers(0, count - 1)))
        messages.append(Message(tuple(pieces[:taken]), draw(st.integers(0, 3)), draw(st.integers(0, len(lanes) - 1)), held))
        pieces = pieces[taken:]
    plan = Plan("drawn", "drawn", specs, tuple(messages), lanes)
    if draw(st.booleans()) if sequenced is None else sequenced:
        plan = plan.with_sequence(tuple(draw(st.permutations(range(len(messages))))))
    return plan


def profile_of(
    *tensors: tuple[int, int],
    names: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    forward_ns: int | Sequence[int] = 10,
    update_ns: int = 0,
    backward_ns: int | None = None,
    uncovered_ns: int = 0,
) -> Profile:
    """A profile of tensors as (ready_ns, size_bytes), in the order in which they become ready.

    Args:
        names: of the tensors; t0, t1, ... where not given.
        layers: the first that uses each; each has one of its own where not given, the last ready being the first used.
        dtypes: of the tensors; float32 where not given.
        forward_ns: of each layer, or of all.
        update_ns: of every layer.
        backward_ns: as long as the last tensor takes where not given.
        uncovered_ns: the rest of an iteration.
    """
    count = len(tensors)
    of_layer = layers or [count - 1 - index for index in range(count)]
    forward = [forward_ns] * (max(of_layer) + 1) if isinstance(forward_ns, int) else forward_ns
    return Profile(
        "test",
        "none",
        tuple(
            TensorProfile(
                TensorSpec(names[index] if names else f"t{index}", size, dtypes[index] if dtypes else "float32"),
                ready,
                of_layer[index],
            )
            for index, (ready, size) in enumerate(tensors)
        ),
        tuple(Layer(f"l{index}", time_ns, update_ns) for index, time_ns in enumerate(forward)),
        tensors[-1][0] if backward_ns is None else backward_ns,
        uncovered_ns=uncovered_ns,
    )


def planned(name: str, profile: Profile, where: Network | Cluster, **knobs: int) -> Plan:
    """The plan of a policy for all-reduce on a network, its order fixed ahead, or for the servers of a cluster."""
    policy = policies.get(name, **knobs)
    if isinstance(where, Cluster):
        return policy.plan(profile, where.as_network())
    return planned_ahead(policy.plan(profile, where), profile, where)


@st.composite
def jobs(draw: st.DrawFn, wires: Sequence[Wire] = WIRES, two_phase: bool = True, sequenced: bool | None = None) -> Job:
    """Any small training run: a plan as `plans` draws them, and a profile of its tensors.

    Args:
        wires: candidates for the plan's wire.
        two_phase: whether messages may be split into two phases.
        sequenced: whether the plan fixes the order of its messages; None: either.
    """
    plan = draw(plans(sequenced=sequenced))
    messages = plan.messages
    if two_phase and draw(st.booleans()):
        messages = tuple(structs.replace(message, two_phase=draw(st.booleans())) for message in messages)
    lanes = tuple(structs.replace(lane, network_priority=draw(st.integers(0, 1))) for lane in plan.lanes)
    plan = structs.replace(
        plan, messages=messages, lanes=lanes, wire=draw(st.sampled_from(wires)), crosses_barrier=draw(st.booleans())
    )
    layers = tuple(Layer(f"l{index}", draw(GAPS_NS), draw(GAPS_NS)) for index in range(draw(st.integers(1, 4))))
    tensors: list[TensorProfile] = []
    ready_ns = 0
    for spec in plan.tensors:
        ready_ns += draw(GAPS_NS)
        tensors.append(TensorProfile(spec, ready_ns, draw(st.integers(0, len(layers) - 1))))
    # uncovered time costs no draw of its own: each makes faults of fabrics harder to find
    return Job(
        plan, Profile("drawn", "none", tuple(tensors), layers, ready_ns + draw(GAPS_NS), uncovered_ns=layers[0].update_ns)
    )


def chain(*layers: tuple[int, int, int, int]) -> Profile:
    """A profile of layers 1 to L, each with one tensor.

    Args:
        layers: of each layer its backward pass in ns, its tensor in bytes, its update in ns and its
            forward pass in ns.
    """
    tensors: list[TensorProfile] = []
    now = 0
    for place, (backward, size_bytes, _, _) in reversed(list(enumerate(layers))):
        now += backward
        tensors.append(TensorProfile(TensorSpec(f"t{place}", size_bytes), now, place))
    return Profile(
        "chain",
        "none",
        tuple(tensors),
        tuple(Layer(f"l{place}", forward, update) for place, (_, _, update, forward) in enumerate(layers)),
        now,
    )


LAYERS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 40).map(lambda n: 4 * n), st.integers(0, 9), st.integers(0, 60)),
    min_size=1,
    max_size=14,
)
"""Arguments of `chain`, with times like those of its bytes where a byte takes a nanosecond."""


def carried(cluster: Cluster) -> tuple[str, ...]:
    """The names of gradlane's own policies that the servers of `cluster` carry."""
    return policies.names("server", Place.of(cluster).has_external_servers)


@st.composite
def clusters(draw: st.DrawFn, external: bool = True) -> Cluster:
    """Any small cluster: shared hosts, uneven shards, links that change, startup, slow sums,
    network classes, packets that cost time.

    Args:
        external: whether servers may be anywhere; otherwise one is on each worker's host, in its
            process.
    """

    def rarely(*values: int) -> st.SearchStrategy[int | UnsetType]:
        return st.one_of(st.just(UNSET), st.just(UNSET), st.sampled_from(values))

    rates = st.integers(10**7, 10**11)
    steps = st.lists(st.tuples(st.integers(1, 10**7), rates), max_size=2, unique_by=lambda step: step[0])

    def link() -> Link:
        return Link(draw(rates), tuple(RateStep(*step) for step in sorted(draw(steps))))

    hosts = tuple(Host(link(), link()) for _ in range(draw(st.integers(1, 4))))
    place = st.integers(0, len(hosts) - 1)
    workers = tuple(Worker(draw(place), draw(st.sampled_from([100, 150]))) for _ in range(draw(st.integers(1, 3))))
    on = [draw(place) for _ in range(draw(st.integers(1, 3)))]
    if not external:
        on = [worker.host for worker in workers]
    return Cluster(
        hosts,
        workers,
        tuple(Server(host, draw(st.integers(1, 3))) for host in on),
        draw(st.sampled_from([0, 20_000])),
        draw(st.sampled_from([None, 10**10])),
        draw(st.sampled_from([None, 10**10])),
        draw(st.integers(1, 2)),
        packet_startup_ns=draw(rarely(1_000)),
    )
