"""Policies that are found by the place of their class."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane import zoo
from gradlane.cli import main
from gradlane.core.checks import check_plan
from gradlane.core.network import Network
from gradlane.errors import InputError
from gradlane.planning import catalog
from gradlane.testing.generators import networks, profiles
from tests.commands import ROOT, invoke

EXAMPLE = f"{ROOT / 'examples' / 'own_policy.py'}:EqualParts"


KNOBS = """
from typing import ClassVar
import msgspec
from gradlane.core.policy import KnobRange

class Mine(msgspec.Struct, frozen=True):
    name = "mine"
    paper = differs = "-"
    on: bool = False
    part: float = 0.5

    def plan(self, profile, network): ...
"""


def test_a_knob_that_is_true_or_false_is_no_word(tmp_path):
    (tmp_path / "mine.py").write_text(KNOBS)
    for text, on in (("true", True), ("false", False)):
        policy: Any = catalog.get(f"{tmp_path / 'mine.py'}:Mine:on={text}:part=0.25")
        assert (policy.on, policy.part) == (on, 0.25)


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
        (
            "class Mine:\n    name = 'ddp'\n    paper = differs = '-'\n    def plan(self, profile, network): ...",
            {},
            "the name 'ddp'",
        ),
        ("class Mine:\n    def __init__(self): raise KeyError('size')\n    def plan(self): ...", {}, "Mine: KeyError: 'size'"),
        ("def Mine(): ...\nclass Main:\n    def plan(self): ...", {}, "got 'Mine', which is no class, expected .*: Main"),
        (
            "class Mine:\n    def __init__(self, size=1): ...\n    def plan(self): ...",
            {"sizes": 1},
            "'sizes' .*expected size",
        ),
        ("class Mine:\n    def __init__(self, size): ...\n    def plan(self): ...", {}, "no value for its knob 'size'"),
        (
            "class Mine:\n    name = 'a\\nb'\n    paper = differs = '-'\n    def plan(self, profile, network): ...",
            {},
            "its name: got 'a",
        ),
        (f"{KNOBS}", {"on": "no"}, "on: got 'no', expected true or false"),
        (f"{KNOBS}", {"on": 0}, "on: got 0, expected true or false"),
        (f"{KNOBS}", {"part": "nan"}, "part: got 'nan', expected a number"),
        (f"{KNOBS}    replans: ClassVar = 'yes'\n", {}, "replans: got 'yes', expected True or False"),
        (f"{KNOBS}    tunable: ClassVar = {{'on': 3}}\n", {}, "tunable: got .*, expected a KnobRange for each"),
        (
            f"{KNOBS}    tunable: ClassVar = {{'size': KnobRange(1, 2)}}\n",
            {},
            "tunable: got 'size', expected one of its knobs: on",
        ),
        ("def", {}, "which cannot be imported from here "),
        ("import nothing_of_this_name", {}, "No module named 'nothing_of_this_name'"),
    ],
)
def test_what_is_no_policy_is_refused_with_what_it_lacks(tmp_path, text, knobs, fault):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(InputError, match=fault):
        catalog.get(f"{tmp_path / 'mine.py'}:Mine", **knobs)


@pytest.mark.parametrize("name", catalog.names())
def test_a_policys_knobs_may_follow_its_name_and_are_spelled_as_they_are_read(name):
    policy: Any = catalog.get(name)
    assert catalog.spelled(policy) == name
    for knob, value in msgspec.structs.asdict(policy).items():
        for other in (value * 4 if isinstance(value, int) else value, 2**20 + 1, 3 * 2**20, "acknowledged", "at once"):
            try:
                changed = catalog.get(name, **{knob: other})
            except InputError:
                continue
            assert catalog.get(catalog.spelled(changed)) == changed


SPELLED = """
from __future__ import annotations
from typing import TYPE_CHECKING, ClassVar
import msgspec
if TYPE_CHECKING:
    from elsewhere import Thing

class Mine(msgspec.Struct, frozen=True):
    name: ClassVar[str] = "mine"
    paper = differs = "-"
    on: bool = False
    part: float = 0.5
    count: int = 3
    word: str = "ring"
    parts: list[int] = []
    thing: Thing | None = None

    def plan(self, profile, network): ...
"""


def test_all_plain_values_are_spelled_as_they_are_read(tmp_path):
    (tmp_path / "mine.py").write_text(SPELLED)
    (tmp_path / "known.py").write_text(SPELLED.replace("thing: Thing | None = None", ""))
    for file in ("mine", "known"):
        place = f"{tmp_path / file}.py:Mine"
        assert catalog.spelled(catalog.get(place)) == "mine"
    for knobs in ({"on": True}, {"part": 1e-7}, {"part": -2.5}, {"count": -1}, {"word": "reduce_scatter"}, {"word": "v2"}):
        policy: Any = catalog.get(place, **knobs)
        (said,) = [text.partition("=")[2] for text in catalog.spelled(policy).split(":")[1:]]
        again: Any = catalog.get(f"{place}:{next(iter(knobs))}={said}")
        assert msgspec.structs.asdict(again) == msgspec.structs.asdict(policy)


def test_a_users_own_policy_has_knobs_after_its_class_and_its_name():
    assert msgspec.structs.asdict(catalog.get(f"{EXAMPLE}:parts=4"))["parts"] == 4  # type: ignore[arg-type]
    assert catalog.spelled(catalog.get(f"{EXAMPLE}:parts=4")) == "equal-parts:parts=4"


def test_commands_compare_several_settings_of_one_policy():
    settings = ["bytescheduler", "bytescheduler:partition_bytes=256KiB:credit_bytes=1MiB"]
    asked = [word for name in settings for word in ("--policy", name)]
    rows = json.loads(invoke("simulate", "vgg16", "--rate", "10gbit", "--workers", "4", *asked, "--json"))["rows"]
    assert [row["policy"] for row in rows] == settings
    assert rows[1]["messages"] > 2 * rows[0]["messages"]


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


HEAD = """
import msgspec
from gradlane.core.plan import Message, Plan
from gradlane.core.policy import whole

class Mine(msgspec.Struct, frozen=True):
    name = "mine"
    paper = differs = "-"

    def plan(self, profile, network):
        messages = tuple(Message((whole(profile, index),)) for index in range(len(profile.tensors)))
        plan = Plan("mine", profile.model, profile.specs, messages)
"""
PLAIN = (
    HEAD.replace("class Mine(msgspec.Struct, frozen=True):", "class Mine:")
    + """        return plan

    def __init__(self, parts=2):
        self.KEPT = parts
"""
)


def test_knobs_of_a_class_that_is_no_struct_tell_two_settings_apart(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN.replace("KEPT", "parts"))
    (tmp_path / "hidden.py").write_text(PLAIN.replace("KEPT", "_parts"))
    command = ["simulate", "alexnet", "--rate", "10gbit", "--workers", "2", "--json"]
    plain, hidden = ([word for n in (2, 3) for word in ("--policy", f"{tmp_path / name}.py:Mine:parts={n}")]
                     for name in ("plain", "hidden"))  # fmt: skip
    assert [row["policy"] for row in json.loads(invoke(*command, *plain))["rows"]] == ["mine", "mine:parts=3"]
    said = invoke(*command, *hidden, code=2)
    assert "got two policies named 'mine'" in said
    assert "a knob tells two apart if the policy keeps it in an attribute of its name" in said


FAULTY = {
    "nothing": ("        return None", "plan() returned NoneType, expected a gradlane.core.plan.Plan"),
    "a list": ("        return [plan]", "plan() returned list"),
    "an error": ("        return {}['size']", "plan() raised KeyError: 'size' ("),
    "an end": ("        raise SystemExit(0)", "plan() raised SystemExit: 0 ("),
    "tuples": (
        "        return msgspec.structs.replace(plan, messages=(Message(((0, 0, 4),)), *messages))",
        "messages[0] is Message(slices=((0, 0, 4),)",
    ),
    "another name": (
        "        return msgspec.structs.replace(plan, policy='ddp')",
        "its plan's policy is 'ddp', expected 'mine'",
    ),
    "another model": ("        return msgspec.structs.replace(plan, model='other')", "its plan's model is 'other'"),
    "another wire": (
        "        return msgspec.structs.replace(plan, wire='packets')",
        "wire: got 'packets', expected fifo, pull-priority, ",
    ),
    "lanes of something else": (
        "        return msgspec.structs.replace(plan, lanes=({'window_bytes': 3},))",
        "its plan's lanes is ({'window_bytes': 3},), expected a tuple of gradlane.core.plan.Lanes",
    ),
    "tensors in a list": (
        "        return msgspec.structs.replace(plan, tensors=list(plan.tensors))",
        "expected a tuple of TensorSpecs",
    ),
    "a barrier in words": (
        "        return msgspec.structs.replace(plan, crosses_barrier='no')",
        "its plan's crosses_barrier is 'no', expected True or False",
    ),
    "trials of itself": ("        return plan\n\n    def trials(self):\n        return (self,)", "that has trials itself"),
    "no trials": ("        return plan\n\n    def trials(self):\n        return None", "trials() returned None"),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_policy_is_refused_in_one_line_and_the_others_are_ranked(tmp_path, fault):
    text, says = FAULTY[fault]
    place = tmp_path / "mine.py"
    place.write_text(HEAD + text)
    for command in ("plan", "simulate"):
        assert says in invoke(command, "alexnet", "--policy", f"{place}:Mine", code=2)
    said = invoke("simulate", "alexnet", "--policy", "wfbp", "--policy", f"{place}:Mine")
    assert f"mine cannot plan: {'policy mine: ' if 'wire' not in fault else ''}" in said
    assert "wfbp" in said


@pytest.mark.parametrize(
    "command",
    [
        ["simulate", "alexnet"],
        ["whatif", "workers", "alexnet", "--workers", "2,4"],
        ["whatif", "bandwidth", "alexnet", "--workers", "4"],
        ["whatif", "rates", "alexnet", "--rate", "1gbit,10gbit"],
    ],
)
def test_two_policies_of_one_name_are_refused_since_results_could_not_be_told_apart(tmp_path, command):
    place = tmp_path / "two.py"
    place.write_text(HEAD + "        return plan\n\nclass Again(Mine, frozen=True):\n    pass")
    said = invoke(*command, "--policy", f"{place}:Mine", "--policy", f"{place}:Again", code=2)
    assert f"--policy: got two policies named 'mine', {place}:Mine and {place}:Again; expected each name once" in said
    assert "got two policies named 'ddp'" in invoke(*command, "--policy", "ddp", "--policy", "ddp", code=2)


def test_a_policys_file_may_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "near_by.py").write_text("SIZE = 3")
    (tmp_path / "mine.py").write_text(
        "from near_by import SIZE\nclass Mine:\n    name = paper = differs = 'mine'\n    size = SIZE\n"
        "    def plan(self, profile, network): ..."
    )
    mine: Any = catalog.get(f"{tmp_path / 'mine.py'}:Mine")
    assert mine.size == 3


def test_a_file_alone_is_told_of_the_class_in_it(tmp_path):
    (tmp_path / "mine.py").write_text("class Mine:\n    def plan(self): ...")
    with pytest.raises(InputError, match=r"got a file alone, .*mine\.py, expected a class in it too, as .*mine\.py:Mine"):
        catalog.get(str(tmp_path / "mine.py"))


OWN = """
import random
from gradlane.core.plan import Message, Plan
from gradlane.core.policy import whole

class Mine:
    name = paper = differs = "mine"

    def plan(self, profile, network):
        print("planned")
        order = list(range(len(profile.tensors)))
        {shuffle}
        messages = tuple(Message((whole(profile, tensor),), priority=place) for place, tensor in enumerate(order))
        return Plan(self.name, profile.model, profile.specs, messages)
"""


def test_a_policy_that_plans_otherwise_each_time_is_refused_and_what_one_prints_is_not_in_the_answer(tmp_path):
    (tmp_path / "steady.py").write_text(OWN.format(shuffle=""))
    (tmp_path / "random_order.py").write_text(OWN.format(shuffle="random.shuffle(order)"))
    options = ("--rate", "1gbit", "--json")
    steady = CliRunner().invoke(main, ["simulate", "alexnet", "--policy", f"{tmp_path / 'steady.py'}:Mine", *options])
    assert [row["policy"] for row in json.loads(steady.stdout)["rows"]] == ["mine"]
    refused = CliRunner().invoke(main, ["simulate", "alexnet", "--policy", f"{tmp_path / 'random_order.py'}:Mine", *options])
    assert refused.exit_code == 2
    assert "policy mine: plan() gave two plans for one profile and network" in refused.stderr
