"""Which gradients of a step are those of parameters, and whether it has one backward pass."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gradlane.errors import FormatError
from gradlane.trace.device import Intervals
from gradlane.trace.events import ACCUMULATE, MARK, Event
from gradlane.trace.source import MAX_SHAPE

SEVERAL_PASSES = (
    "runs between gradients, so that there are several backward passes (gradient accumulation, several losses or models); "
    "record steps with one backward pass each"
)
_ROUNDED_US = 2.0  # some traces have whole microseconds, whose ends are off by up to this


def inputs_of_checkpoints(inside: Iterable[Event]) -> set[int]:
    """The id() of each AccumulateGrad of an input of a reentrant checkpoint, which runs a backward pass within its own backward
    operation: its inputs are leaves of the graph there, as parameters are. They have the shapes that its forward operation got.
    """
    forward: dict[tuple[int, str], Event] = {}  # by sequence number and name
    around: dict[Any, list[Event]] = defaultdict(list)  # by thread the backward operations that run, the innermost last
    within: dict[int, tuple[Event, list[Event]]] = {}  # by the id() of such an operation, its AccumulateGrad
    for event in inside:
        open_ones = around[event.tid]
        while open_ones and open_ones[-1].end <= event.ts:
            open_ones.pop()
        if event.name == ACCUMULATE:
            if open_ones and not event.args.has_no_gradient:
                within.setdefault(id(open_ones[-1]), (open_ones[-1], []))[1].append(event)
        elif event.args.sequence >= 0:
            if event.args.forward_thread and not event.name.startswith(MARK):
                open_ones.append(event)
            else:
                forward[event.args.sequence, f"{event.name}Backward"] = event
    found: set[int] = set()
    for backward, accumulated in within.values():
        made_by = forward.get((backward.args.sequence, backward.name))
        for shape in _shapes(made_by) if made_by else ():
            alike = [event for event in accumulated if id(event) not in found and _shapes(event)[:1] == [shape]]
            if shape and alike:
                found.add(id(alike[-1]))
    return found


def _shapes(event: Event) -> list[Any]:
    if not 0 < len(event.args.shapes) <= MAX_SHAPE:
        return []
    try:
        return msgspec.json.decode(event.args.shapes, type=list[Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []


def need_one_pass(inside: Sequence[Event], gradients: Sequence[Event], where: str) -> None:
    """Raise `FormatError` if another forward pass, or the beginning of a backward pass, runs on the script's thread between
    the first gradient and the last. Traces without marks of backward operations do not tell.
    """
    marks: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for event in inside:
        if event.name.startswith(MARK):
            marks[event.tid].append((event.ts, event.end))
    if not marks:
        return
    begun = min(begin for each in marks.values() for begin, _ in each)
    forward = Counter(event.tid for event in inside if event.ts < begun and event.args.sequence >= 0)
    if not forward:
        return
    script = forward.most_common(1)[0][0]  # others may load inputs meanwhile
    backward = Intervals(marks[script])
    first, last = gradients[0].end, gradients[-1].ts
    for event in inside:
        is_operation = event.is_work_of_the_host and not event.calls_the_runtime and event.name != ACCUMULATE
        is_between = first < event.ts < last and event.tid == script
        if is_between and is_operation and not backward.within(event.ts - _ROUNDED_US, event.ts + _ROUNDED_US):
            raise FormatError(f"{where}: {event.name} {SEVERAL_PASSES}")
