"""GRADLANE_OPTIONS as somebody may have written it by hand."""

from __future__ import annotations

import pytest

from gradlane.core.launch_options import LaunchOptions
from gradlane.errors import InputError


@pytest.mark.parametrize("text", ["{", "no", "[1]", "null", '{"policy": 3}', '{"timeout": "soon"}', '{"polcy": "ddp"}'])
def test_a_text_that_is_no_options_is_refused_in_one_line_with_the_variable_and_the_text(text: str) -> None:
    with pytest.raises(InputError) as raised:
        LaunchOptions.from_environment({"GRADLANE_OPTIONS": text})
    said = str(raised.value)
    assert said.startswith(f"GRADLANE_OPTIONS: got {text!r}, expected JSON as in")
    assert "\n" not in said


def test_no_text_says_nothing() -> None:
    assert LaunchOptions.from_environment({}) == LaunchOptions.from_environment({"GRADLANE_OPTIONS": ""}) == LaunchOptions()


def test_options_that_matter_to_a_session_only_are_named_as_on_the_command_line() -> None:
    assert LaunchOptions(ddp=True, profile="/folder", attached="/folder").of_sessions() == []
    options = LaunchOptions(policy="p3", policy_knobs={"slice_bytes": 4}, servers=1, verify=True)
    assert options.of_sessions() == ["--policy", "--knob", "--servers", "--verify"]
    assert options.without_effect().startswith("--policy, --knob, --servers and --verify had no effect: the script attached")
    assert "took over no model" in LaunchOptions(ddp=True, verify=True).without_effect()


def test_every_option_is_either_of_a_session_or_of_the_launcher() -> None:
    others = {"servers_store", "profile", "ddp", "attached"}
    given = {name: 1 for name in LaunchOptions.__struct_fields__ if name not in others}
    assert len(LaunchOptions(**given).of_sessions()) == len(given)
