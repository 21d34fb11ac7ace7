"""The options --policy and --knob: a name, perhaps with knobs after it, and NAME=VALUE, each once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradlane.cli.inputs.faults import naming
from gradlane.core.policy import Policy
from gradlane.errors import InputError
from gradlane.planning import catalog


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
            knobs[name] = catalog.parse_value(value)
    return knobs


def read_policy(name: str, knobs: dict[str, Any] | None = None, *, option: str = "--policy") -> Policy:
    """The policy of a name.

    Args:
        name: as `catalog.get` takes it.
        knobs: more values for the policy's knobs, as `parse_knobs` gives them.
        option: where the name was given.

    Raises:
        InputError: there is no such policy, or it refuses a knob; the message names the option.
    """
    with naming(option):
        setting = catalog.parse(name)
        try:
            policy = catalog.get(name)
        except InputError as error:
            is_about_knob = str(error).partition(": ")[0] in setting.knobs
            raise (InputError(f"{setting.name}: {error}") if is_about_knob else error) from None
    if not knobs:
        return policy
    try:
        return catalog.get(name, **knobs)
    except InputError as error:
        of_policy, _, rest = str(error).partition(": ")
        is_named = of_policy == f"policy {setting.name}"
        raise InputError(f"--knob: {rest.replace('got knob ', 'got ')}" if is_named else f"--knob {error}") from None


def read_policies(names: Sequence[str], *, option: str = "--policy") -> list[Policy]:
    """The policies of several names, which results tell apart by their names and knobs.

    Raises:
        InputError: as `read_policy`, or two of them are the same.
    """
    policies = [read_policy(name, option=option) for name in names]
    places: dict[str, str] = {}
    for place, policy in zip(names, policies, strict=True):
        setting = catalog.spelled(policy)
        if setting in places:
            kept = "; a knob tells two apart if the policy keeps it in an attribute of its name, as a msgspec.Struct does"
            raise InputError(
                f"{option}: got two policies named {setting!r}, {places[setting]} and {place}; expected each name once"
                + (kept if catalog.is_users(policy) and catalog.parse(place).knobs else "")
            )
        places[setting] = place
    return policies
