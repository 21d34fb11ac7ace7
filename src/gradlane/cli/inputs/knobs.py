"""The options --policy and --knob: a name, and NAME=VALUE, each once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gradlane.cli.inputs.faults import naming
from gradlane.core.policy import Policy
from gradlane.errors import InputError
from gradlane.planning import catalog
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
        with naming(f"--knob {name}"):
            knobs[name] = _value(value)
    return knobs


def read_policy(name: str, knobs: dict[str, Any] | None = None, *, option: str = "--policy") -> Policy:
    """The policy of a name.

    Args:
        name: as `catalog.get` takes it.
        knobs: values for the policy's knobs, as `parse_knobs` gives them.
        option: where the name was given.

    Raises:
        InputError: there is no such policy, or it refuses a knob; the message names the option.
    """
    with naming(option):
        policy = catalog.get(name)
    if not knobs:
        return policy
    try:
        return catalog.get(name, **knobs)
    except InputError as error:
        of_policy, _, rest = str(error).partition(": ")
        raise InputError(
            f"--knob: {rest.replace('got knob ', 'got ')}" if of_policy == f"policy {name}" else f"--knob {error}"
        ) from None


def read_policies(names: Sequence[str], *, option: str = "--policy") -> list[Policy]:
    """The policies of several names, which results tell apart by their names.

    Raises:
        InputError: as `read_policy`, or two of them have one name.
    """
    policies = [read_policy(name, option=option) for name in names]
    places: dict[str, str] = {}
    for place, policy in zip(names, policies, strict=True):
        if policy.name in places:
            raise InputError(
                f"{option}: got two policies named {policy.name!r}, {places[policy.name]} and {place}; expected each name once"
            )
        places[policy.name] = place
    return policies


def _value(text: str) -> float | int | str:
    """Parse a value: a decimal such as 0.1, a word such as ring, or else a size or whole number."""
    if re.fullmatch(r"\d*\.\d+", text):
        return float(text)
    return text if re.fullmatch(r"[a-z][a-z-]*", text) else parse_bytes(text)
