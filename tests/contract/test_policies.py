"""What every policy of gradlane promises. A new one joins by being in the registry."""

from __future__ import annotations

import inspect
import sys

import msgspec
import pytest

from gradlane import policies
from gradlane.core.backends import why_not
from gradlane.core.network import Network
from gradlane.errors import InputError
from gradlane.testing.generators import chain
from gradlane.testing.policies import CHECKS

TWO, LINE = chain((1, 4, 0, 1), (0, 4, 0, 1)), Network.line(2, 10, 10**9)
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
        "owners",
    )
    assert policies.default() == "blocks"
    assert policies.default("server") == "mercury"


@every_policy
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_policy_keeps_the_promises_of_policies(name, check):
    check(policies.get(name), 50)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.extra
def test_geryon_as_its_paper_has_it_keeps_them_too(check):
    check(policies.get("geryon", pulls="after pushes", pull_seed=3, slice_elements=1000, shards=3), 20)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("p3", {"buffer_bytes": 100_000}),
        ("geryon", {"threshold": "auto"}),
        ("bytescheduler", {"partition_bytes": 2_000, "credit_bytes": 2_000, "until": "acknowledged"}),
    ],
)
def test_other_choices_of_a_policy_keep_them_too(name, knobs, check):
    check(policies.get(name, **knobs), 20)


@every_policy
def test_the_name_of_a_policy_is_that_of_the_registry_and_all_reduce_leaves_its_order_to_be_fixed(name):
    assert policies.get(name).name == name
    assert policies.get(name).plan(TWO, LINE).sequence is None


@every_policy
@pytest.mark.parametrize(("backend", "external"), [("all-reduce", False), ("server", False), ("server", True)])
def test_the_registry_says_which_backends_can_carry_the_plans(name, backend, external):
    plan = policies.get(name).plan(TWO, LINE)
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
def test_a_policy_says_in_its_file_when_it_wins_and_how_it_differs_from_the_paper(name):
    policy = policies.get(name)
    assert "\nWins where " in inspect.getdoc(policy)
    assert "\nDiffers from the paper" in inspect.getdoc(policy)
    assert sys.modules[type(policy).__module__].__doc__


def test_an_unknown_policy_is_refused_with_what_exists():
    with pytest.raises(InputError, match="got 'fast', expected one of wfbp, ddp, sync-easgd"):
        policies.get("fast")
