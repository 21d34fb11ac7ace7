"""Parameter servers in virtual time: against the papers' formulas, by hand, and every policy on any cluster."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane import policies
from gradlane.core.checks import check_timeline
from gradlane.core.cluster import Cluster, Host, Link, RateStep, Server, Worker
from gradlane.core.place import Place
from gradlane.core.plan import Lane, Message, Plan, Slice
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.core.timeline import Timeline
from gradlane.errors import InputError
from gradlane.planning import catalog
from gradlane.planning.plans import make_plan
from gradlane.sim import Job, simulate_jobs, simulate_servers
from gradlane.sim.servers import simulation
from gradlane.sim.sharding import Sharding
from gradlane.testing.generators import LAYERS, carried, chain, clusters, planned, profiles
from gradlane.testing.oracles import mercury_algorithm_1, mercury_iteration

GB = 10**9  # a byte a nanosecond


def last_step(timelines: tuple[Timeline, ...]) -> int:
    return max(timeline.iteration_ns()[-1] for timeline in timelines)


def ends(timeline: Timeline, kind: str) -> dict[int, int]:
    """End of each message in the first iteration, after the start of backward."""
    begun = timeline.of("backward")[0].start_ns
    return {span.subject: span.end_ns - begun for span in timeline.of(kind) if span.iteration == 0}


# -- the papers' models -----------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(layers=LAYERS, workers=st.sampled_from([1, 2, 7, 2048]))
def test_packet_priority_without_startup_is_mercurys_algorithm_1(layers, workers):
    profile, cluster = chain(*layers), Cluster.homogeneous(workers, workers, GB)
    t_bp, t_push, t_upd, t_fp = ([0, *column] for column in zip(*layers, strict=True))
    tau_bp = [0] * (len(layers) + 1)
    for layer in range(len(layers), 0, -1):
        tau_bp[layer] = t_bp[layer] + (tau_bp[layer + 1] if layer < len(layers) else 0)
    tau_push = mercury_algorithm_1(tau_bp, t_bp, t_push)
    expected = {tensor: tau_push[len(layers) - tensor] for tensor in range(len(layers))}
    (timeline,) = simulate_servers(planned("mercury", profile, cluster), profile, cluster)
    assert ends(timeline, "send") == ends(timeline, "receive") == expected  # Eq. 8
    assert timeline.iteration_ns()[-1] == mercury_iteration(tau_push, t_upd, t_fp)


@settings(max_examples=60, deadline=None)
@given(layers=LAYERS)
def test_whole_messages_are_pushed_as_mercurys_equation_6_says_and_pulled_one_after_another(layers):
    profile, cluster = chain(*layers), Cluster.homogeneous(3, 3, GB)
    (timeline,) = simulate_servers(planned("wfbp", profile, cluster), profile, cluster, 1)
    push = pull = 0
    pushes, pulls = ends(timeline, "send"), ends(timeline, "receive")
    for tensor, seen in enumerate(profile.tensors):
        push = max(push, seen.ready_ns) + seen.spec.size_bytes
        pull = max(pull, push) + seen.spec.size_bytes  # Eq. 7, where no pull is in the way of the next
        assert (pushes[tensor], pulls[tensor]) == (push, pull)


@pytest.mark.parametrize("whole", [False, True])
def test_a_split_messages_sum_is_returned_when_all_have_been_pushed_and_it_is_asked_for(whole):
    # half of the bytes stay on their host
    profile = chain((1_000, 160, 1, 10), (3_000, 8_000, 1, 10), (2_000, 4_000, 2, 10))
    cluster = msgspec.structs.replace(Cluster.homogeneous(2, 2, GB, colocated=True), packet_bytes=8)
    plan = planned("dear", profile, cluster, fusion_bytes=1)
    (timelines,) = simulation([Job(plan, profile)], cluster, 1, whole=whole).run()
    for timeline in timelines:
        check_timeline(timeline, plan)
        late = 16 * whole  # a packet is on each of two links
        pushed, pulled = ends(timeline, "send"), ends(timeline, "receive")
        assert pushed == {
            0: pytest.approx(4_000, abs=late),
            1: pytest.approx(9_000, abs=late),
            2: pytest.approx(9_080, abs=late),
        }
        # layer 2 before layer 3, which was pushed first; layer 1 in front, where all of it is with the servers when it has left
        assert pulled[1] == pytest.approx(13_160, abs=80 * whole + 2 * late)
        assert pulled[0] == pytest.approx(15_160, abs=80 * whole + 2 * late)
        assert whole or pulled[2] == 9_160
        pulls = {span.subject: span.start_ns for span in timeline.of("receive")}
        assert set(pulls.values()) == {timeline.of("backward")[0].start_ns + pushed[2]}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(layers=LAYERS, name=st.sampled_from(["mercury", "mercury-no-preemption"]))
def test_small_packets_come_near_to_the_flow(layers, name):
    profile = chain(*layers)
    cluster = msgspec.structs.replace(Cluster.homogeneous(1, 1, GB), packet_bytes=8)
    plan = planned(name, profile, cluster)
    ((flow,),) = simulation([Job(plan, profile)], cluster).run()
    ((packets,),) = simulation([Job(plan, profile)], cluster, whole=True).run()
    check_timeline(packets, plan)
    # four links, each with one packet before it, and one of lower priority on each
    assert flow.iteration_ns()[-1] <= packets.iteration_ns()[-1] <= flow.iteration_ns()[-1] + 8 * 8


MANY = chain(*((200_000, size, 1, 100_000) for _ in range(12) for size in (240_000, 128, 60_000, 64)))
"""Large tensors and next to nothing in turns, as in a network of convolutions with biases."""


@pytest.mark.parametrize(
    ("name", "colocated"),
    [(name, colocated) for colocated in (False, True) for name in policies.names("server", external=not colocated)],
)
def test_packets_between_alike_workers_take_about_what_the_flow_does(name, colocated):
    cluster = msgspec.structs.replace(Cluster.homogeneous(3, 3, GB // 8, colocated=colocated), packet_bytes=3_000)
    plan = planned(name, MANY, cluster)
    (flow,) = simulate_servers(plan, MANY, cluster, 4)
    timelines = simulation([Job(plan, MANY)], cluster, 4, whole=True).run()[0]
    for packets in timelines:
        check_timeline(packets, plan)
        assert packets.iteration_ns()[-1] == pytest.approx(flow.iteration_ns()[-1], rel=0.06)


@pytest.mark.parametrize("cluster", [Cluster.homogeneous(1, 1, GB // 10), Cluster.homogeneous(2, 2, GB // 10, colocated=True)])
def test_a_switch_does_not_wait_for_a_packet_to_come_whole(cluster):
    # one packet each way: the flow, of infinitely small ones, takes as long
    cluster = msgspec.structs.replace(cluster, packet_bytes=10**6, startup_ns=70)
    profile = chain((10, 4_096, 3, 20))
    plan = planned("wfbp", profile, cluster)
    (flow,) = simulate_servers(plan, profile, cluster)
    away = 4_096 // len(cluster.workers)  # bytes that pass a link each way
    assert flow.iteration_ns()[-1] == profile.compute_ns + 2 * (70 + 10 * away)
    assert {each.iteration_ns()[-1] for each in simulate_servers(plan, profile, cluster, whole=True)} == {
        flow.iteration_ns()[-1]
    }


@settings(max_examples=40, deadline=None)
@given(packets=st.integers(1, 30), startup=st.integers(1, 5_000))
def test_a_packet_costs_its_startup_and_its_bytes_one_after_another(packets, startup):
    cluster = Cluster.homogeneous(1, 1, GB // 10)
    cluster = msgspec.structs.replace(cluster, packet_bytes=640, packet_startup_ns=startup)
    profile = chain((10, 640 * packets, 3, 20))
    (timeline,) = simulate_servers(planned("mercury-no-preemption", profile, cluster), profile, cluster)
    each = startup + 6_400
    assert timeline.iteration_ns()[-1] == profile.compute_ns + (packets + 1) * each  # the last one comes back too
    assert cluster.as_network().bytes_per_second == pytest.approx(640 * 10**9 / each, rel=1e-6)


def acknowledged(plan):
    return msgspec.structs.replace(plan, lanes=tuple(msgspec.structs.replace(lane, acknowledged=True) for lane in plan.lanes))


@settings(max_examples=40, deadline=None)
@given(slices=st.integers(2, 12), startup_ns=st.integers(0, 300_000), name=st.sampled_from(["bytescheduler", "p3"]))
def test_a_slice_alone_in_its_window_waits_for_the_acknowledgement_of_the_one_before(slices, startup_ns, name):
    size, rate = 6_400, GB // 10
    cluster = Cluster.homogeneous(2, 1, rate, startup_ns=startup_ns)
    profile = chain((10, slices * size, 3, 20))
    sizes = {"slice_bytes": size} if name == "p3" else {"partition_bytes": size, "credit_bytes": size}
    plan = make_plan(catalog.get(name, until="acknowledged", **sizes), profile, Place.of(cluster))
    timelines = simulate_servers(plan, profile, cluster, iterations=2)
    for timeline in timelines:
        check_timeline(timeline, plan)
    sends = [span for span in timelines[0].of("send") if span.iteration == 1]
    pulled = {span.subject: span.end_ns for span in timelines[0].of("receive") if span.iteration == 1}
    for before, after in itertools.pairwise(sorted(sends, key=lambda span: span.start_ns)):
        assert after.start_ns == before.end_ns
        # two workers share the server's link; the acknowledgement comes after both, or the sum before it
        assert before.end_ns - before.start_ns >= startup_ns + size * 10**9 // rate
        assert before.end_ns <= pulled[before.subject]


def test_an_acknowledgement_comes_so_long_after_the_servers_have_the_message():
    cluster = msgspec.structs.replace(Cluster.homogeneous(1, 1, GB // 10, startup_ns=50_000), packet_bytes=640)
    profile = chain((10, 6_400, 3, 20))
    plan = acknowledged(make_plan(catalog.get("wfbp"), profile, Place.of(cluster)))
    (timeline,) = simulate_servers(plan, profile, cluster)
    (send,) = (span for span in timeline.of("send") if span.iteration == 1)
    # the startup, the bytes over a link whose switch sends on what it has, and the acknowledgement, a message too
    assert send.end_ns - send.start_ns == 50_000 + 64_000 + 50_000


@settings(deadline=None)
@given(size=st.integers(1, 250_000), servers=st.integers(1, 6), packet_bytes=st.integers(64, 40_000))
def test_each_server_gets_as_few_packets_of_a_message_as_can_be_and_equally_many(size, servers, packet_bytes):
    profile = chain((10, 4 * size, 3, 20))
    cluster = msgspec.structs.replace(Cluster.homogeneous(2, servers, GB), packet_bytes=packet_bytes)
    dealt = Sharding(Job(planned("mercury", profile, cluster), profile), cluster)
    each = -(-4 * size // (servers * packet_bytes))  # packets, at least, of the server that has most
    held = [[size for size, to in zip(dealt.size, dealt.server, strict=True) if to == server] for server in range(servers)]
    assert sum(dealt.size) == 4 * size
    assert max(dealt.size) <= packet_bytes
    assert max(map(len, held)) <= each
    # lengths are rounded up to 64 bytes, and the last packets lack that
    assert max(map(sum, held)) - min(map(sum, held)) <= 64 * each * servers


def test_what_one_worker_pushes_does_not_keep_another_from_its_sums():
    # who is ahead pushes gradients more urgent than the sums that the other still waits for
    cluster = Cluster.homogeneous(2, 2, GB // 8, colocated=True)
    plan = planned("mercury", MANY, cluster)
    even = last_step(simulate_servers(plan, MANY, cluster))
    for seed in range(4):
        timelines = simulate_servers(plan, MANY, cluster, 12, jitter=0.03, seed=seed)
        assert max(length for timeline in timelines for length in timeline.iteration_ns()) < 1.15 * even


@settings(max_examples=60, deadline=None)
@given(layers=LAYERS, theta=st.integers(0, 50), elements=st.integers(2, 12), credit=st.integers(1, 4))
def test_slices_over_servers_are_delayed_by_no_more_than_bytescheduler_says(layers, theta, elements, credit):
    # §4.1: sum of floor(size / delta) theta, and theta, and 2 delta / bandwidth; a credit of one slice
    delta = 4 * elements
    profile = chain(*((backward, -(-size // delta) * delta, update, forward) for backward, size, update, forward in layers))
    free, cluster = Cluster.homogeneous(2, 2, GB), Cluster.homogeneous(2, 2, GB, startup_ns=theta)
    (ideal,) = simulate_servers(planned("mercury", profile, free), profile, free)
    plan = planned("bytescheduler", profile, cluster, partition_bytes=delta, credit_bytes=delta)
    (sliced,) = simulate_servers(plan, profile, cluster)
    slices = sum(tensor.spec.size_bytes // delta for tensor in profile.tensors)
    assert sliced.iteration_ns()[-1] <= ideal.iteration_ns()[-1] + slices * theta + theta + 2 * delta


ONE_TENSOR = chain((10, 4_000, 3, 20))


def two_lanes(wire: str) -> tuple[Plan, Profile]:
    """Two equal tensors, ready at once: the urgent one is message 1 and has the lane of the higher priority."""
    specs = (TensorSpec("later", 400_000), TensorSpec("urgent", 400_000))
    tensors = tuple(TensorProfile(spec, 0, 1 - place) for place, spec in enumerate(specs))
    profile = Profile("two", "none", tensors, (Layer("first", 0), Layer("second", 0)), 0)
    messages = (Message((Slice(0, 0, 400_000),), lane=1), Message((Slice(1, 0, 400_000),), lane=0))
    plan = Plan("test", "two", specs, messages, (Lane(), Lane(network_priority=1)), crosses_barrier=True, wire=wire)
    return plan, profile


def test_two_servers_and_one_worker_as_in_geryons_figure_5():
    # both parameters reach the worker's downlink, which is the narrow one, at the same time
    wide, narrow = Link(10**13), Link(GB)
    hosts = (Host(wide, narrow), Host(wide, wide), Host(wide, wide))
    plan, profile = two_lanes("fifo")
    arrived = {}
    for classes in (1, 2):
        cluster = Cluster(hosts, (Worker(0),), (Server(1), Server(2)), network_classes=classes, packet_bytes=1_000)
        ((timeline,),) = simulate_jobs([Job(plan, profile, placement=(0, 1))], cluster, 1)
        arrived[classes] = ends(timeline, "receive")
    # with classes in the network the urgent one has the link; without, both share it and it takes twice as long
    assert arrived[2][1] == pytest.approx(400_000, rel=0.01)
    assert arrived[1][1] == pytest.approx(800_000, rel=0.01)
    assert arrived[1][0] == pytest.approx(800_000, rel=0.01)
    assert arrived[2][0] == pytest.approx(800_000, rel=0.01)


@pytest.mark.parametrize("whole", [False, True], ids=["fluid", "packets"])
@pytest.mark.parametrize(("classes", "urgent_ns", "other_ns"), [(1, 800_000, 800_000), (2, 400_000, 800_000)])
def test_lanes_share_a_link_unless_it_serves_their_classes(whole, classes, urgent_ns, other_ns):
    plan, profile = two_lanes("packet-fifo")
    cluster = msgspec.structs.replace(Cluster.homogeneous(1, 1, GB, network_classes=classes), packet_bytes=1_000)
    (timeline,) = simulation((Job(plan, profile),), cluster, 1, whole=whole).run()[0]
    assert ends(timeline, "send") == {0: pytest.approx(other_ns, rel=0.01), 1: pytest.approx(urgent_ns, rel=0.01)}


@pytest.mark.parametrize("whole", [False, True], ids=["fluid", "packets"])
@pytest.mark.parametrize(("wire", "order"), [("fifo", [0, 1, 2]), ("pull-priority", [2, 1, 0])])
def test_a_server_returns_the_most_urgent_of_its_sums_first_if_the_wire_says_so(whole, wire, order):
    # three messages of 4,000 bytes leave within 1,300 ns, and one comes back in 4,000: the others overtake the first meanwhile
    profile = chain(*[(100, 4_000, 0, 0)] * 3)
    messages = tuple(Message((Slice(tensor, 0, 4_000),), priority=2 - tensor) for tensor in range(3))
    plan = Plan("test", profile.model, profile.specs, messages, wire=wire)
    hosts = (Host(Link(10 * GB), Link(GB)), Host(Link(10 * GB), Link(10 * GB)))
    cluster = Cluster(hosts, (Worker(0),), (Server(1),), packet_bytes=1_000)
    (timeline,) = simulation([Job(plan, profile)], cluster, 1, whole=whole).run()[0]
    arrived = ends(timeline, "receive")
    assert sorted(arrived, key=arrived.__getitem__) == order
    assert max(ends(timeline, "send").values()) < min(arrived.values())


# -- by hand ----------------------------------------------------------------------------------------------


def communication(cluster: Cluster, name: str = "mercury", **simulation: int) -> int:
    """What one tensor of 4000 bytes takes after backward."""
    plan = planned(name, ONE_TENSOR, cluster)
    return last_step(simulate_servers(plan, ONE_TENSOR, cluster, **simulation)) - ONE_TENSOR.compute_ns


@pytest.mark.parametrize(
    ("cluster", "name", "expected_ns"),
    [
        (Cluster.homogeneous(4, 4, GB), "mercury", 4_000),
        (Cluster.homogeneous(4, 4, GB), "wfbp", 8_000),
        (Cluster.homogeneous(4, 2, GB), "mercury", 8_000),
        (Cluster.homogeneous(4, 8, GB), "mercury", 4_000),
        (Cluster.homogeneous(1, 1, GB, colocated=True), "mercury", 0),
        # 2 (n - 1) / n of the bytes each way on the shared links, as a ring would send
        (Cluster.homogeneous(4, 4, GB, colocated=True), "mercury", 6_000),
        (Cluster.homogeneous(4, 4, GB, colocated=True), "wfbp", 6_000),
        (Cluster.homogeneous(4, 4, GB, startup_ns=70), "mercury", 4_070),
        (Cluster.homogeneous(4, 4, GB, startup_ns=70), "wfbp", 8_140),
        (Cluster.homogeneous(4, 4, GB, sum_bytes_per_second=GB // 2), "mercury", 8_000),
        (Cluster.homogeneous(4, 4, GB, sum_bytes_per_second=GB), "wfbp", 9_000),
    ],
)
def test_one_tensor_takes(cluster, name, expected_ns):
    assert communication(cluster, name) == pytest.approx(expected_ns, abs=2)


def test_servers_that_update_take_the_update_off_the_workers():
    cluster = msgspec.structs.replace(Cluster.homogeneous(4, 4, GB), update_bytes_per_second=GB)
    # 4000 bytes each way, the update of a quarter of them between, and no 3 ns of the worker's own
    assert communication(cluster, "wfbp") == 9_000 - 3
    assert communication(cluster, "mercury") == 4_000 - 3


@pytest.mark.parametrize("whole", [False, True])
def test_a_link_that_slows_down_is_followed(whole):
    slowing = Link(GB, (RateStep(1_030, GB // 2),))
    cluster = Cluster(
        (Host(slowing, Link(10**13)), Host(Link(10**13), Link(10**13))), (Worker(0),), (Server(1),), packet_bytes=8
    )
    plan = planned("mercury", ONE_TENSOR, cluster)
    ((timeline,),) = simulation([Job(plan, ONE_TENSOR)], cluster, 1, whole=whole).run()
    # from 30 on 1000 bytes by 1030, the other 3000 by 7030
    assert timeline.of("send")[0].end_ns == pytest.approx(7_030, abs=20)


def test_what_2048_workers_do_costs_no_more_than_what_2_do():
    runs = []
    for workers in (2, 2048):
        cluster = Cluster.homogeneous(workers, workers, GB)
        profile = chain((10, 4_000, 3, 20), (50, 40_000, 3, 20))
        run = simulation([Job(planned("p3", profile, cluster, slice_bytes=400), profile)], cluster)
        ((timeline,),) = run.run()
        runs.append((timeline.iteration_ns(), run.events))
    assert runs[0] == runs[1]


def test_a_synchronous_job_runs_at_the_speed_of_its_slowest_worker_and_an_asynchronous_one_does_not():
    hosts = (Host(Link(10**12), Link(10**12)),) * 3
    cluster = Cluster(hosts, (Worker(0), Worker(1, 300)), (Server(2),))
    profile = chain((10_000, 400, 0, 5_000))
    plan = planned("mercury", profile, cluster)
    together = simulate_servers(plan, profile, cluster, 6)
    apart = simulate_servers(plan, profile, cluster, 6, staleness=None)
    bounded = simulate_servers(plan, profile, cluster, 6, staleness=2)
    for timelines in (together, apart, bounded):
        for timeline in timelines:
            check_timeline(timeline, plan)
    assert [timeline.iteration_ns()[-1] // 1_000 for timeline in together] == [45, 45]
    assert [timeline.iteration_ns()[-1] // 1_000 for timeline in apart] == [15, 45]
    # the fast one runs two iterations ahead and then at the pace of the slow one
    fast, slow = bounded
    assert [length // 1_000 for length in fast.iteration_ns()] == [15, 15, 15, 44, 45, 45]
    for span in fast.of("use"):
        if span.subject == 0 and span.iteration >= 2:
            done = [send.end_ns for send in slow.of("send") if send.iteration == span.iteration - 3]
            assert all(end <= span.start_ns for end in done)
    assert sum(apart[0].iteration_ns()) < sum(fast.iteration_ns()) < sum(together[0].iteration_ns())


def test_jobs_that_share_links_share_them_evenly():
    cluster = Cluster.homogeneous(2, 2, GB)
    plan = planned("mercury", ONE_TENSOR, cluster)
    both = simulate_jobs([Job(plan, ONE_TENSOR)] * 2, cluster)
    assert [last_step(timelines) for timelines in both] == [8_000 + ONE_TENSOR.compute_ns] * 2


def test_a_server_with_three_quarters_of_the_bytes_is_the_narrow_place():
    link = Link(GB)
    even, uneven = (
        Cluster((Host(link, link),) * 4, (Worker(0), Worker(1)), (Server(2), Server(3, weight)), packet_bytes=40)
        for weight in (1, 3)
    )
    plan = planned("mercury", ONE_TENSOR, even)
    times = []
    for cluster in (even, uneven):
        (timelines,) = simulation([Job(plan, ONE_TENSOR)], cluster, whole=True).run()
        times.append(last_step(timelines) - ONE_TENSOR.compute_ns)
    assert times == [pytest.approx(4_000, rel=0.06), pytest.approx(6_000, rel=0.06)]
    assert uneven.as_network().bytes_per_second == 666_666_666


def test_jitter_is_the_same_for_a_seed_and_another_for_another():
    cluster = Cluster.homogeneous(2, 2, GB)
    plan = planned("mercury", ONE_TENSOR, cluster)

    def run(seed: int) -> list[int]:
        return [
            length for t in simulate_servers(plan, ONE_TENSOR, cluster, jitter=0.2, seed=seed) for length in t.iteration_ns()
        ]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_what_servers_cannot_do_is_refused():
    cluster = Cluster.homogeneous(2, 2, GB)
    plan = planned("mercury", ONE_TENSOR, cluster)
    with pytest.raises(InputError, match="got a plan for chain"):
        Job(plan, chain((1, 8, 0, 0)))
    with pytest.raises(InputError, match="placement: got 7, expected an integer from 0 to 1"):
        simulate_jobs([Job(plan, ONE_TENSOR, placement=(7,))], cluster)
    with pytest.raises(InputError, match=r"jitter: got 1\.5"):
        simulate_servers(plan, ONE_TENSOR, cluster, jitter=1.5)


# -- anything at all --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", policies.names("server"))
@settings(max_examples=12, deadline=None)
@given(profile=profiles(max_tensors=12, max_elements=40_000), data=st.data(), staleness=st.sampled_from([0, 1, None]))
def test_every_policy_runs_on_any_cluster_that_carries_it_and_its_timelines_pass(name, profile, data, staleness):
    cluster = data.draw(clusters(external=name in policies.names("server", external=True)))
    plan = planned(name, profile, cluster)
    if data.draw(st.booleans()):
        plan = acknowledged(plan)
    for timeline in simulate_servers(plan, profile, cluster, 2, staleness=staleness, jitter=0.1):
        check_timeline(timeline, plan)
        assert len(timeline.iteration_ns()) == 2


@settings(max_examples=40, deadline=None)
@given(
    profile=profiles(max_tensors=10),
    workers=st.integers(1, 4),
    colocated=st.booleans(),
    startup=st.sampled_from([0, 30_000]),
    data=st.data(),
)
def test_alike_workers_collapse_to_one_whose_timeline_passes(profile, workers, colocated, startup, data):
    cluster = Cluster.homogeneous(workers, workers, GB, colocated=colocated, startup_ns=startup)
    plan = planned(data.draw(st.sampled_from(carried(cluster))), profile, cluster)
    (timeline,) = simulate_servers(plan, profile, cluster)
    check_timeline(timeline, plan)
    assert timeline.iteration_ns()[-1] == timeline.iteration_ns()[-2] >= profile.compute_ns


def test_a_link_that_would_change_after_the_end_does_not_keep_the_simulation_going():
    link = Link(GB, (RateStep(10**15, 2 * GB),))
    cluster = Cluster((Host(link, link),) * 2, (Worker(0),), (Server(1),))
    (timeline,) = simulate_servers(planned("wfbp", ONE_TENSOR, cluster), ONE_TENSOR, cluster)
    assert timeline.iteration_ns()[-1] == 8_000 + ONE_TENSOR.compute_ns
