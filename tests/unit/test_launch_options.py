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
