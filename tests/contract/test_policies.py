"""What every policy promises. A new policy joins by being in the registry."""

from __future__ import annotations

import sys

import msgspec
import pytest
from hypothesis import given, settings

from gradlane import policies
from gradlane.core import files
from gradlane.core.backends import why_not
from gradlane.core.checks import check_plan, check_timeline
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.errors import InputError
from gradlane.planning.plans import make_plan
from gradlane.sim import iteration_ns, simulate
from tests.unit.strategies import networks, profiles

every_policy = pytest.mark.parametrize("name", policies.names())


def test_the_registry_has_the_policies_of_the_papers():
    assert policies.names() == (
        "wfbp",
        "ddp",
        "sync-easgd",
        "mg-wfbp",
        "mg-wfbp-exact",
        "p3",
        "tictac",
        "bytescheduler",
        "blocks",
        "prophet",
        "geryon",
        "mercury",
        "mercury-no-preemption",
        "dear",
    )
    assert policies.default() == "blocks"
    assert policies.default("server") == "mercury"


@every_policy
@settings(max_examples=20, deadline=None)
@given(profile=profiles(), network=networks())
def test_a_plan_moves_each_byte_once_is_the_same_again_and_can_be_filed(name, profile, network):
    policy = policies.get(name)
    plan = policy.plan(profile, network)
    check_plan(plan, profile.specs)
    assert plan.policy == name
    assert plan.size_bytes == profile.size_bytes

    assert policy.plan(profile, network) == plan

    read = files.loads(files.dumps(plan), Plan)
    assert read == plan
    assert read.fingerprint == plan.fingerprint


@pytest.mark.parametrize("name", policies.names("all-reduce"))
@settings(max_examples=20, deadline=None)
@given(profile=profiles(), network=networks())
def test_all_reduce_carries_a_plan_out_as_it_does_with_its_order_fixed_ahead(name, profile, network):
    plan = policies.get(name).plan(profile, network)
    ahead = make_plan(policies.get(name), profile, Place(network))
    assert ahead.sequence is not None
    assert sorted(ahead.sequence) == list(range(len(plan.messages)))
    assert ahead.fingerprint != plan.fingerprint
    check_plan(ahead, profile.specs)

    free, bound = simulate(plan, profile, network, 2), simulate(ahead, profile, network, 2)
    check_timeline(free, plan)
    check_timeline(bound, ahead)
    assert bound.spans == free.spans
    assert free.iteration_ns()[-1] >= profile.compute_ns
    assert iteration_ns(plan, profile, network) == free.iteration_ns()[-1]


@every_policy
@pytest.mark.parametrize(("backend", "external"), [("all-reduce", False), ("server", False), ("server", True)])
def test_the_registry_says_which_backends_can_carry_the_plans(name, backend, external):
    tensors = tuple(TensorProfile(TensorSpec(f"t{index}", 4), index, 1 - index) for index in range(2))
    profile = Profile("two", "none", tensors, (Layer("first", 1), Layer("second", 1)), 1)
    plan = policies.get(name).plan(profile, Network.line(2, 10, 10**9))
    assert (why_not(plan, backend, external) is None) == (name in policies.names(backend, external))


@every_policy
def test_a_knob_that_does_not_exist_is_refused_by_name(name):
    with pytest.raises(InputError, match=rf"^policy {name}: got knob 'speed', expected"):
        policies.get(name, speed=1)


@every_policy
@pytest.mark.parametrize("value", [-1, "4MiB", True, None, float("nan")])
def test_a_knob_with_a_value_of_no_use_is_refused(name, value):
    for knob in msgspec.structs.asdict(policies.get(name)):
        with pytest.raises(InputError, match=knob):
            policies.get(name, **{knob: value})


@every_policy
def test_a_policy_says_what_it_is_and_how_it_differs(name):
    policy = policies.get(name)
    assert isinstance(policy, Policy)
    assert policy.name == name
    assert policy.paper
    assert policy.differs
    module = sys.modules[type(policy).__module__]
    assert "Differs from the paper" in type(policy).__doc__
    assert module.__doc__


def test_an_unknown_policy_is_refused_with_what_exists():
    with pytest.raises(InputError, match="got 'fast', expected one of wfbp, ddp, sync-easgd"):
        policies.get("fast")
