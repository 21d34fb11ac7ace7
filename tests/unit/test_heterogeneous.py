from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane import policies
from gradlane.core.checks import check_timeline
from gradlane.core.cluster import RateStep
from gradlane.core.network import Network
from gradlane.errors import InputError
from gradlane.policies.geryon import Geryon
from gradlane.sim import planned_ahead, simulate, simulate_heterogeneous
from gradlane.testing.generators import chain, networks, planned, profiles

THREE = Network.line(3, 50, 10**9)  # a byte a nanosecond


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    profile=profiles(max_tensors=12),
    network=networks(),
    workers=st.integers(1, 4),
    name=st.sampled_from(policies.names("all-reduce")),
)
def test_workers_that_are_alike_do_what_one_does(profile, network, workers, name):
    network = msgspec.structs.replace(network, workers=workers)
    plan = planned(name, profile, network)
    alone = simulate(plan, profile, network)
    for timeline in simulate_heterogeneous(plan, profile, network):
        check_timeline(timeline, plan)
        assert timeline.iteration_ns() == alone.iteration_ns()


def test_a_collective_waits_for_the_slowest_worker_and_ends_for_all_at_once():
    profile = chain((1_000, 400, 10, 500))
    plan = planned("sync-easgd", profile, THREE)
    timelines = simulate_heterogeneous(plan, profile, THREE, compute_percent=(100, 300, 100))
    # the slow one: 3 * (500 + 1000), then 450 on the network, then its update of 30; the others have waited
    assert [timeline.iteration_ns()[-1] for timeline in timelines] == [4_980] * 3
    ends = [timeline.of("send")[0].end_ns for timeline in timelines]
    assert ends == [4_500 + 450] * 3


def test_a_network_that_slows_down_in_the_middle_is_followed_and_startups_stay():
    profile = chain((1_000, 4_000, 0, 0))
    plan = planned("sync-easgd", profile, THREE)
    # ready at 1000, startup until 1050, 2000 bytes by 3050, the other 2000 at a quarter of the rate
    timelines = simulate_heterogeneous(plan, profile, THREE, 1, steps=(RateStep(3_050, 250_000_000),))
    assert timelines[0].of("send")[0].end_ns == 3_050 + 8_000
    # all of it at a quarter from the beginning
    timelines = simulate_heterogeneous(plan, profile, THREE, 1, steps=(RateStep(0, 250_000_000),))
    assert timelines[0].of("send")[0].end_ns == 1_050 + 16_000


def test_what_is_interrupted_goes_on_where_it_stopped_though_the_rate_has_changed():
    # t1 of 4000 bytes from 10 on, t0 of 400 from 1010 on in a lane of a more urgent class; the rate halves at 2000
    profile = chain((1_000, 400, 0, 0), (10, 4_000, 0, 0))
    network = Network.line(2, 0, 10**9)
    plan = planned_ahead(Geryon(threshold_percent=25).plan(profile, network), profile, network)
    timeline = simulate_heterogeneous(plan, profile, network, 1, steps=(RateStep(2_000, 500_000_000),))[0]
    ends = {span.subject: span.end_ns for span in timeline.of("send")}
    by_tensor = {plan.messages[message].tensors[0]: end for message, end in ends.items()}
    # 1000 bytes of t1, 400 of t0, 590 of t1 until 2000, 2410 at half the rate
    assert by_tensor == {1: 1_410, 0: 2_000 + 2 * (4_000 - 1_000 - 590)}


def test_jitter_is_the_same_for_a_seed_and_costs_the_slowest_of_all():
    profile = chain((100_000, 400, 10, 50_000))
    plan = planned("blocks", profile, THREE)

    def steps(seed, jitter):
        return simulate_heterogeneous(plan, profile, THREE, 20, jitter=jitter, seed=seed)[0].iteration_ns()

    assert steps(1, 0.2) == steps(1, 0.2)
    assert steps(1, 0.2) != steps(2, 0.2)
    assert sum(steps(1, 0.2)) > sum(steps(1, 0.0))


@settings(max_examples=40, deadline=None)
@given(
    profile=profiles(max_tensors=8),
    percent=st.lists(st.integers(50, 300), min_size=1, max_size=4),
    rates=st.lists(st.integers(10**6, 10**10), max_size=3),
    jitter=st.sampled_from([0.0, 0.3]),
    name=st.sampled_from(policies.names("all-reduce")),
)
def test_every_policy_runs_among_any_workers_and_its_timelines_pass(profile, percent, rates, jitter, name):
    network = Network.line(len(percent), 20_000, 10**9)
    plan = planned(name, profile, network)
    steps = tuple(RateStep(index * 1_000_000, rate) for index, rate in enumerate(rates))
    for timeline in simulate_heterogeneous(plan, profile, network, compute_percent=percent, steps=steps, jitter=jitter):
        check_timeline(timeline, plan)


def test_what_cannot_be_simulated_is_refused():
    profile = chain((10, 400, 0, 20))
    plan = policies.get("wfbp").plan(profile, THREE)
    with pytest.raises(InputError, match=r"compute_percent: got '2 workers', expected 3"):
        simulate_heterogeneous(plan, profile, THREE, compute_percent=(100, 100))
    with pytest.raises(InputError, match="jitter"):
        simulate_heterogeneous(plan, profile, THREE, jitter=1.5)
