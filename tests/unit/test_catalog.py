"""Policies that are found by the place of their class."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane import zoo
from gradlane.core.checks import check_plan
from gradlane.core.network import Network
from gradlane.errors import InputError
from gradlane.planning import catalog
from gradlane.testing.generators import networks, profiles
from tests.commands import ROOT, invoke

EXAMPLE = f"{ROOT / 'examples' / 'own_policy.py'}:EqualParts"


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(profile=profiles(), network=networks(), parts=st.integers(1, 20))
def test_the_example_moves_every_byte_once_whatever_the_model(profile, network, parts):
    check_plan(catalog.get(EXAMPLE, parts=parts).plan(profile, network), profile.specs)


def test_the_example_has_as_many_messages_as_it_is_asked_for_and_the_first_layer_goes_first():
    profile = zoo.profile("vgg16")
    plan = catalog.get(EXAMPLE, parts=4).plan(profile, Network.line(2, 0, 10**9))
    assert 4 <= len(plan.messages) <= 8  # parts are whole tensors or cuts of one, so that some end early
    assert [message.priority for message in plan.messages] == list(range(len(plan.messages)))
    first = profile.urgency().index(0)
    assert first in plan.messages[0].tensors


def test_a_module_that_can_be_imported_from_here_is_found_too(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert catalog.get("examples.own_policy:EqualParts").name == "equal-parts"
    assert catalog.is_own("examples.own_policy:EqualParts")
    assert not catalog.is_own("blocks")


@pytest.mark.parametrize(
    ("text", "knobs", "fault"),
    [
        ("", {}, "got 'Mine', which .* does not have, expected a class with a plan: it has none"),
        ("class Other:\n    def plan(self): ...", {}, "expected a class with a plan: Other"),
        ("class Mine:\n    name = 'mine'", {}, "got a class without paper, differs, plan"),
        ("class Mine:\n    name = paper = differs = 'mine'\n    def plan(self): ...", {"size": 1}, "Mine: "),
        ("def", {}, "which cannot be imported from here "),
        ("import nothing_of_this_name", {}, "No module named 'nothing_of_this_name'"),
    ],
)
def test_what_is_no_policy_is_refused_with_what_it_lacks(tmp_path, text, knobs, fault):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(InputError, match=fault):
        catalog.get(f"{tmp_path / 'mine.py'}:Mine", **knobs)


@pytest.mark.parametrize("place", ["nowhere.py:Mine", "nowhere.at.all:Mine", ":Mine", "x:"])
def test_a_place_where_nothing_is_is_refused(place):
    with pytest.raises(InputError, match="policy: "):
        catalog.get(place)


@pytest.mark.parametrize(
    "command",
    [
        ["simulate", "vgg16", "--rate", "10gbit", "--workers", "4"],
        ["plan", "vgg16", "--rate", "10gbit", "--workers", "4", "--knob", "parts=4"],
        ["whatif", "workers", "vgg16", "--rate", "10gbit", "--workers", "2,4"],
        ["whatif", "rates", "vgg16", "--rate", "1gbit,10gbit", "--workers", "4"],
        ["whatif", "bandwidth", "vgg16", "--workers", "4"],
    ],
)
def test_commands_take_the_place_of_a_class_for_a_policys_name(command):
    said = invoke(*command, "--policy", EXAMPLE)
    assert "equal-parts" in said
    assert EXAMPLE not in said
