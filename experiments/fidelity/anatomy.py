"""Anatomy: where a prediction goes wrong, per tensor: a live timeline beside the simulated one of the same plan."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from gradlane.core.plan import Plan
from gradlane.core.timeline import Timeline

STAGES = ("ready", "sent", "summed")
"""When a gradient was ready, the last message with a part of it started, the last of them ended. When the sum is used is not
among them: a live run updates what has come at `step()`, the simulator before its layer, and neither costs the other time.
"""


class Gap(msgspec.Struct, frozen=True):
    """Between two stages a tensor took `gap_ns` longer than simulated, the most of all tensors (shorter: below 0)."""

    stage: str
    tensor: str
    gap_ns: int


class Anatomy(msgspec.Struct, frozen=True):
    """late_ns: for each stage by how much it was later than simulated, counted from the start of backward; the median
    over tensors.
    """

    late_ns: tuple[int, ...]
    largest: Gap


def dissect(plan: Plan, live: Timeline, simulated: Timeline) -> Anatomy | None:
    """None where the live timeline has no whole iteration."""
    seen, expected = moments(plan, live), moments(plan, simulated)
    if not seen or not expected:
        return None
    late = [
        [there - here for there, here in zip(each, wanted, strict=True)] for each, wanted in zip(seen, expected, strict=True)
    ]
    largest = Gap(STAGES[0], "", 0)
    for tensor, each in enumerate(late):
        before = 0
        for stage, by_ns in zip(STAGES, each, strict=True):
            if abs(by_ns - before) > abs(largest.gap_ns):
                largest = Gap(stage, plan.tensors[tensor].name, by_ns - before)
            before = by_ns
    return Anatomy(tuple(round(statistics.median(stage)) for stage in zip(*late, strict=True)), largest)


def moments(plan: Plan, timeline: Timeline) -> list[Sequence[int]]:
    """For each tensor when it reached each of `STAGES`, in ns after the start of backward: medians over whole iterations."""
    found: list[list[list[int]]] = [[[] for _ in STAGES] for _ in plan.tensors]
    kinds = {kind: timeline.of(kind) for kind in ("backward", "ready", "send", "receive")}
    for backward in kinds["backward"]:
        mine = {
            kind: {span.subject: span for span in spans if span.iteration == backward.iteration}
            for kind, spans in kinds.items()
        }
        if len(mine["ready"]) < len(plan.tensors) or len(mine["send"]) < len(plan.messages):
            continue
        begun = backward.start_ns
        for tensor in range(len(plan.tensors)):
            found[tensor][0].append(mine["ready"][tensor].start_ns - begun)
        sent, summed = [0] * len(plan.tensors), [0] * len(plan.tensors)
        for index, message in enumerate(plan.messages):
            start, end = mine["send"][index].start_ns, mine["receive"].get(index, mine["send"][index]).end_ns
            for tensor in message.tensors:
                sent[tensor], summed[tensor] = max(sent[tensor], start - begun), max(summed[tensor], end - begun)
        for tensor in range(len(plan.tensors)):
            found[tensor][1].append(sent[tensor])
            found[tensor][2].append(summed[tensor])
    if not found[0][0]:
        return []
    return [[round(statistics.median(times)) for times in stages] for stages in found]
