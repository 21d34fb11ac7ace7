"""Steps: times at which several gradients become ready together (Prophet, ICPP '21, §2.2).

Measured times are never equal. Two gradients belong to one step if the second follows within half
of backward_ns / (number of tensors), the distance that evenly spaced gradients would have.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from gradlane.core.profile import Profile
from gradlane.units import counted, format_bytes, format_ns


class GradientStep(NamedTuple):
    """Gradients that become ready together.

    Attributes:
        ready_ns: when the last of them is ready, in ns from the start of the backward pass.
        tensors: how many they are.
        size_bytes: their bytes.
    """

    ready_ns: int
    tensors: int
    size_bytes: int


def steps(profile: Profile) -> tuple[GradientStep, ...]:
    """The steps of the backward pass, in order of time."""
    found: list[GradientStep] = []
    max_gap_ns = profile.backward_ns // (2 * len(profile.tensors))
    for seen in profile.tensors:
        if found and seen.ready_ns - found[-1].ready_ns <= max_gap_ns:
            before = found.pop()
            found.append(GradientStep(seen.ready_ns, before.tensors + 1, before.size_bytes + seen.spec.size_bytes))
        else:
            found.append(GradientStep(seen.ready_ns, 1, seen.spec.size_bytes))
    return tuple(found)


def stepwise(profile: Profile) -> Profile:
    """The same profile with each gradient ready at the end of its step."""
    ready_ns = [step.ready_ns for step in steps(profile) for _ in range(step.tensors)]
    tensors = tuple(
        msgspec.structs.replace(seen, ready_ns=at_ns) for seen, at_ns in zip(profile.tensors, ready_ns, strict=True)
    )
    return msgspec.structs.replace(profile, tensors=tensors)


def describe(profile: Profile) -> str:
    """One line on the number of steps and the largest one, for people."""
    found = steps(profile)
    largest = max(found, key=lambda step: step.size_bytes)
    return (
        f"{counted(len(profile.tensors), 'gradients')}, ready at {counted(len(found), 'moments')} of a backward pass of "
        f"{format_ns(profile.backward_ns)}; most bytes at {format_ns(largest.ready_ns)}: "
        f"{counted(largest.tensors, 'gradients')}, {format_bytes(largest.size_bytes)}"
    )
