from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane import zoo
from gradlane.core.cluster import Cluster
from gradlane.core.network import Network
from gradlane.errors import InputError
from gradlane.planning import catalog
from gradlane.planning.questions import Case, judge, knob_grid, needed_rates, sweep
from gradlane.sim import iteration_ns, planned_ahead, simulate
from gradlane.testing.generators import chain, networks, profiles

PROFILE = chain((1_000_000, 4_000_000, 0, 500_000), (2_000_000, 1_000_000, 0, 500_000))
NETWORK = Network.line(4, 50_000, 10**9)
SERVERS = Cluster.homogeneous(4, 4, 10**9, startup_ns=30_000)


@settings(max_examples=30, deadline=None)
@given(profile=profiles(max_tensors=8), network=networks(), name=st.sampled_from(Case(PROFILE, NETWORK).policies))
def test_a_policy_is_judged_by_the_simulation_of_its_plan(profile, network, name):
    outcome = judge(catalog.get(name), Case(profile, network))
    plan = planned_ahead(catalog.get(name).plan(profile, network), profile, network)
    assert outcome.plan == plan
    assert outcome.iteration_ns == iteration_ns(plan, profile, network)
    assert outcome.iteration_ns >= outcome.bound_ns >= outcome.oracle_ns
    assert outcome.timeline() == simulate(plan, profile, network)


def test_a_sweep_has_every_policy_of_every_case_in_order_and_tells_how_far_it_is():
    done = []
    cases = [Case(PROFILE, NETWORK), Case(PROFILE, SERVERS)]
    outcomes = sweep(cases, advance=done.append)
    assert [outcome.policy for outcome in outcomes] == [*cases[0].policies, *cases[1].policies]
    assert "mercury" in cases[1].policies
    assert "mercury" not in cases[0].policies
    assert done == [1] * len(outcomes)
    assert all(outcome.above_bound >= 0 and 0 < outcome.efficiency <= 1 for outcome in outcomes)


def test_policies_by_name_and_those_that_cannot_be():
    (outcome,) = sweep([Case(PROFILE, SERVERS)], ["wfbp"])
    assert outcome.policy == "wfbp"
    with pytest.raises(InputError, match="policy: got 'fast'"):
        sweep([Case(PROFILE, NETWORK)], ["fast"])


@settings(max_examples=25, deadline=None)
@given(target=st.floats(0.3, 0.98), startup=st.integers(0, 20_000))
def test_the_rate_that_one_message_behind_backward_needs_is_the_closed_form(target, startup):
    # iteration = compute + startup + bytes / rate
    compute, size = PROFILE.compute_ns, PROFILE.size_bytes
    exact = size * 1e9 / (compute / target - compute - startup)
    (needed,) = needed_rates(
        catalog.get("sync-easgd"), lambda rate: Case(PROFILE, Network.line(4, startup, rate)), [target], low=10**7, high=10**12
    )
    assert needed.bytes_per_second == pytest.approx(exact, rel=0.011)
    assert needed.bytes_per_second >= exact * (1 - 1e-5)
    assert needed.reached >= target


def test_a_target_that_no_rate_reaches_and_one_that_every_rate_does():
    policy = catalog.get("sync-easgd")
    # the startup alone costs more than a tenth
    never, always = needed_rates(policy, lambda rate: Case(PROFILE, Network.line(4, 10**6, rate)), [0.9, 0.01], low=10**9)
    assert never.bytes_per_second is None
    assert 0.7 < never.reached < 0.8
    assert always.bytes_per_second is not None
    assert always.bytes_per_second < 1.6 * 10**9
    assert (never.is_lowest_tried, always.is_lowest_tried) == (False, True)
    with pytest.raises(InputError, match=r"target: got 1\.5"):
        needed_rates(policy, lambda rate: Case(PROFILE, NETWORK), [1.5])


def test_a_grid_of_knobs_leaves_out_credits_below_the_partition():
    grid = knob_grid(catalog.get("bytescheduler"), Case(PROFILE, SERVERS), [2**18, 2**20], [2**18, 2**20])
    assert [(partition, credit) for partition, credit, _ in grid] == [(2**18, 2**18), (2**18, 2**20), (2**20, 2**20)]
    assert all(len(outcome.plan.messages) >= 5_000_000 // partition for partition, _, outcome in grid)


def test_the_zoo_can_be_asked():
    outcomes = sweep([Case(zoo.profile("vgg16"), Cluster.homogeneous(2, 2, 1_250_000_000))], ["wfbp", "mercury"])
    assert outcomes[0].efficiency < outcomes[1].efficiency
