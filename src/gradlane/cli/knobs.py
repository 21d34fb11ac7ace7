"""The option --knob: NAME=VALUE, each once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gradlane.errors import InputError
from gradlane.units import parse_bytes


def parse_knobs(texts: Sequence[str]) -> dict[str, Any]:
    """Knobs by name. Raises `InputError` for anything but NAME=VALUE, and for a name twice."""
    knobs: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InputError(f"--knob: got {text!r}, expected NAME=VALUE, as in partition_bytes=4MiB")
        if name in knobs:
            raise InputError(f"--knob: got {name} twice, expected it once")
        # a float such as 0.1 is a share; everything else that policies take is a size
        knobs[name] = float(value) if re.fullmatch(r"\d*\.\d+", value) else parse_bytes(value)
    return knobs
