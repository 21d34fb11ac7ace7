"""Space: a policy's knobs as points of the unit cube; sizes on a log scale, plain numbers evenly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gradlane.core.policy import KnobRange, Policy, tunable
from gradlane.core.profile import TensorSpec
from gradlane.errors import InputError

Point = tuple[float, ...]
"""For each knob a number from 0 (its smallest value) to 1 (its largest)."""

MOST_PIECES = 2048  # no size is tried that cuts a model into more slices: each has overhead, live and simulated
_ALIGN = 64  # bytes: sizes end between elements of every dtype, and between cache lines


@dataclass(frozen=True)
class Space:
    """The knobs of one policy that are searched.

    Attributes:
        policy: the policy with its own values.
        ranges: the range of each knob.
    """

    policy: Policy
    ranges: Mapping[str, KnobRange]

    @classmethod
    def of(cls, policy: Policy, specs: tuple[TensorSpec, ...]) -> Space:
        """The tunable knobs of `policy`, without sizes that make no difference to a model.

        Raises:
            InputError: the policy declares none, or its other knobs contradict the ends of a range.
        """
        declared = tunable(policy)
        if not declared or not isinstance(policy, msgspec.Struct):
            raise InputError(f"policy {policy.name}: it declares no knobs to tune; expected one with `tunable` ranges")
        total_bytes = sum(spec.size_bytes for spec in specs)
        ranges = {}
        for name, declared_range in declared.items():
            if declared_range.step is not None:
                ranges[name] = declared_range
                continue
            low = max(_ALIGN, min(declared_range.low, total_bytes // 16), total_bytes // MOST_PIECES)
            ranges[name] = KnobRange(low, max(low, min(declared_range.high, total_bytes)))
        space = cls(policy, ranges)
        for corner in (0.0, 1.0):
            space.at((corner,) * space.dimensions)
        return space

    @property
    def dimensions(self) -> int:
        return len(self.ranges)

    def knobs(self, point: Point) -> dict[str, int]:
        """The values at `point`: sizes aligned to 64 bytes, numbers in whole steps from the lowest."""
        found = {}
        for part, (name, (low, high, step)) in zip(point, self.ranges.items(), strict=True):
            part = min(1.0, max(0.0, part))
            if step is not None:
                found[name] = min(high, low + step * round(part * (high - low) / step))
                continue
            size = round(low * (high / low) ** part)
            found[name] = max(_ALIGN, size - size % _ALIGN)
        return found

    def point(self, knobs: Mapping[str, int]) -> Point:
        """The point of these values; values beyond a range go to its end."""
        parts = []
        for name, (low, high, step) in self.ranges.items():
            if step is not None:
                parts.append(min(1.0, max(0.0, (knobs[name] - low) / max(1, high - low))))
                continue
            width = math.log(high / low)
            parts.append(min(1.0, max(0.0, math.log(max(1, knobs[name]) / low) / width)) if width else 0.0)
        return tuple(parts)

    @property
    def start(self) -> dict[str, int]:
        """The values that the policy was given."""
        return {name: getattr(self.policy, name) for name in self.ranges}

    def at(self, point: Point) -> Policy:
        """The policy with the values at `point`."""
        return with_knobs(self.policy, self.knobs(point))


def with_knobs(policy: Policy, knobs: Mapping[str, Any]) -> Policy:
    """The policy with some knobs changed.

    Raises:
        InputError: the policy does not have a knob or refuses its value.
    """
    if not isinstance(policy, msgspec.Struct):
        raise InputError(
            f"policy {policy.name}: got a {type(policy).__name__}, expected a msgspec.Struct with its knobs as fields"
        )
    unknown = sorted(set(knobs) - set(policy.__struct_fields__))
    if unknown:
        raise InputError(f"policy {policy.name}: got knob {unknown[0]!r}, expected {', '.join(policy.__struct_fields__)}")
    changed: Policy = type(policy)(**{**msgspec.structs.asdict(policy), **knobs})
    return changed
