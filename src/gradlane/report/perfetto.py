"""Timelines as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

A rank is a process with a track of its iterations, one of its compute thread, and one for each lane
of messages in flight. Events on a track of that format must nest, so events that would cross others
go on a second track of the same name. Bytes that links carried and queued are counters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from gradlane.core.plan import Plan
from gradlane.core.timeline import Kind, Span, Timeline, union
from gradlane.errors import InputError

_COMPUTE: tuple[Kind, ...] = ("forward", "backward", "update", "wait")

# what a track holds: (start, end, name, arguments)
_Event = tuple[int, int, str, dict[str, Any]]


class LinkCount(NamedTuple):
    """One direction of a link, at a time on the timelines' clock.

    Attributes:
        at_ns: the time.
        passed_bytes: all bytes that have passed so far.
        queued_bytes: bytes that wait.
    """

    at_ns: int
    passed_bytes: int
    queued_bytes: int


def chrome_trace(
    timelines: Sequence[Timeline],
    plans: Sequence[Plan],
    labels: Sequence[str] = (),
    *,
    layers: Sequence[str] = (),
    shared_clock: bool = False,
    links: Mapping[str, Sequence[LinkCount]] | None = None,
) -> bytes:
    """Encode timelines side by side as JSON in Chrome's trace event format, in microseconds.

    Args:
        timelines: what to show.
        plans: the plan of each timeline, or one for all.
        labels: the name of each timeline's run, one for all, or none. A process is named by label
            and rank; pids count on from label to label.
        layers: names of the profile's layers, for forward spans.
        shared_clock: whether the timelines of a label have one clock (ranks of one host), so that
            they keep their distances. Otherwise each begins at 0.
        links: by name, the counts of each link, shown with each run while it lasted; needs
            `shared_clock`.

    Raises:
        InputError: the numbers of items differ, a timeline is of another plan, or a rank occurs
            twice in a run.
    """
    plans = _one_each(plans, len(timelines), "plans")
    names = _one_each(labels or ("",), len(timelines), "labels")
    runs: dict[str, int] = {name: place for place, name in enumerate(dict.fromkeys(names))}
    stride = 1 + max((timeline.rank for timeline in timelines), default=0)
    begins: dict[object, int] = {}
    lasted: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for place, (timeline, name) in enumerate(zip(timelines, names, strict=True)):
        begin = min((span.start_ns for span in timeline.spans), default=0)
        clock = name if shared_clock else place
        begins[clock] = min(begins.get(clock, begin), begin)
        lasted[name] += [(span.start_ns, span.end_ns) for span in timeline.spans]
    events: list[dict[str, Any]] = []
    seen: set[int] = set()
    for place, (timeline, plan, name) in enumerate(zip(timelines, plans, names, strict=True)):
        pid = runs[name] * stride + timeline.rank
        if pid in seen:
            raise InputError(f"timelines[{place}]: got rank {timeline.rank} of {name or 'the run'} again, expected it once")
        if timeline.plan != plan.fingerprint:
            raise InputError(f"timelines[{place}]: got a timeline of plan {timeline.plan}, expected {plan.fingerprint}")
        seen.add(pid)
        begin = begins[name if shared_clock else place]
        events += _process(pid, f"{name} rank {timeline.rank}".strip(), timeline, plan, layers, begin)
    if links and shared_clock:
        for name, place in runs.items():
            events += _counters(len(runs) * stride + place, f"{name} links".strip(), links, begins[name], union(lasted[name]))
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _one_each(values: Sequence[Any], count: int, what: str) -> Sequence[Any]:
    if len(values) == 1:
        return list(values) * count
    if len(values) != count:
        raise InputError(f"{what}: got {len(values)}, expected 1 or {count}, one for each timeline")
    return values


def _process(pid: int, name: str, timeline: Timeline, plan: Plan, layers: Sequence[str], begin_ns: int) -> list[dict[str, Any]]:
    """All events of one rank: its tracks' names, then the tracks in the order shown."""
    tracks: list[tuple[str, list[_Event]]] = []
    steps: list[_Event] = [(s.start_ns, s.end_ns, f"iteration {s.iteration}", {}) for s in timeline.of("step")]
    tracks += _spread("iterations", steps, nest=False)
    tracks += _spread("compute", _compute(timeline, plan, layers), nest=True)
    tracks += _spread("plans", [(s.start_ns, s.end_ns, f"{plan.policy} begins", {}) for s in timeline.of("switch")], nest=False)
    halves: tuple[tuple[Kind, str], ...] = (("send", "lane"), ("receive", "receive, lane"))
    for kind, title in halves:
        by_lane: dict[int, list[_Event]] = defaultdict(list)
        for span in timeline.of(kind):
            message = plan.messages[span.subject]
            arguments = {"iteration": span.iteration, "bytes": message.size_bytes, "priority": message.priority}
            by_lane[message.lane].append((span.start_ns, span.end_ns, plan.describe_message(span.subject), arguments))
        for lane in sorted(by_lane):
            tracks += _spread(f"{title} {lane}", by_lane[lane], nest=False)
    events: list[dict[str, Any]] = [_metadata(pid, 0, "process_name", {"name": name})]
    for tid, (track, content) in enumerate(tracks):
        events.append(_metadata(pid, tid, "thread_name", {"name": track}))
        events.append(_metadata(pid, tid, "thread_sort_index", {"sort_index": tid}))
        for start, end, label, arguments in content:
            at = {"ts": (start - begin_ns) / 1000, "dur": (end - start) / 1000}
            events.append({"ph": "X", "pid": pid, "tid": tid, "name": label, **at, "args": arguments})
    return events


def _counters(
    pid: int, name: str, links: Mapping[str, Sequence[LinkCount]], begin_ns: int, lasted: Sequence[tuple[int, int]]
) -> list[dict[str, Any]]:
    """The rate of each link between two counts, and its queue, while something of the run is shown."""
    events = [_metadata(pid, 0, "process_name", {"name": name})]
    for link, counts in links.items():
        for before, count in pairwise(counts):
            if not any(start <= before.at_ns and count.at_ns <= end for start, end in lasted):
                continue
            megabits = (count.passed_bytes - before.passed_bytes) * 8e3 / (count.at_ns - before.at_ns)
            for what, at_ns, value in (("Mbit/s", before.at_ns, megabits), ("bytes queued", count.at_ns, count.queued_bytes)):
                at = (at_ns - begin_ns) / 1000
                events.append({"ph": "C", "pid": pid, "name": f"{link}, {what}", "ts": at, "args": {what: value}})
    return events


def _metadata(pid: int, tid: int, what: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": arguments}


def _compute(timeline: Timeline, plan: Plan, layers: Sequence[str]) -> list[_Event]:
    """What the compute thread did; tensors updated together are one event."""
    together: dict[tuple[Kind, int, int, int], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind in _COMPUTE:
            apart = span.subject if span.kind == "forward" else -1
            together[span.kind, apart, span.start_ns, span.end_ns].append(span)
    events: list[_Event] = []
    for (kind, _, start, end), spans in together.items():
        subject = spans[0].subject
        label: str = kind
        if subject >= 0 and kind == "forward":
            label += f" {layers[subject]}" if subject < len(layers) else f" of layer {subject}"
        elif subject >= 0:
            label += f" {'for ' if kind == 'wait' else ''}{plan.tensors[subject].name}"
            label += f" and {len(spans) - 1} more" if len(spans) > 1 else ""
        events.append((start, end, label, {"iteration": spans[0].iteration}))
    return events


def _spread(name: str, events: Iterable[_Event], *, nest: bool) -> list[tuple[str, list[_Event]]]:
    """Put `events` on tracks, first-fit, so that none overlap, or with `nest` so that none cross."""
    tracks: list[tuple[list[_Event], list[int]]] = []  # the events and the ends of those still open
    # of two that start together the longer is the outer one
    for event in sorted(events, key=lambda event: (event[0], -event[1])):
        start, end = event[0], event[1]
        for _, ends in tracks:
            while ends and ends[-1] <= start:
                ends.pop()
        place = next((i for i, (_, ends) in enumerate(tracks) if not ends or (nest and end <= ends[-1])), len(tracks))
        if place == len(tracks):
            tracks.append(([], []))
        tracks[place][0].append(event)
        tracks[place][1].append(end)
    return [(name if place == 0 else f"{name} ({place + 1})", track) for place, (track, _) in enumerate(tracks)]
