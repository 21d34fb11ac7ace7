"""The option --knob: NAME=VALUE, each once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gradlane.errors import InputError
from gradlane.units import parse_bytes


def parse_knobs(texts: Sequence[str]) -> dict[str, Any]:
    """The values of knobs, by name.

    Raises:
        InputError: a text is not NAME=VALUE, or a name is there twice.
    """
    knobs: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InputError(f"--knob: got {text!r}, expected NAME=VALUE, as in partition_bytes=4MiB")
        if name in knobs:
            raise InputError(f"--knob: got {name} twice, expected it once")
        knobs[name] = _value(value)
    return knobs


def _value(text: str) -> float | int | str:
    """Parse a value: a decimal such as 0.1, a word such as ring, or else a size or whole number."""
    if re.fullmatch(r"\d*\.\d+", text):
        return float(text)
    return text if re.fullmatch(r"[a-z][a-z-]*", text) else parse_bytes(text)
