"""From timelines and plans to what the page draws."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

import numpy as np

from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.timeline import Kind, Span, Timeline, union
from gradlane.report.page import facts
from gradlane.report.perfetto import LinkCount

SHOWN = 2  # iterations of each arm
_MOST_WAITED_FOR = 8
_UNUSUAL = 3  # times the median step
_INNER_FIRST: tuple[Kind, ...] = ("wait", "update", "forward", "backward")


def typical_iterations(timelines: Sequence[Timeline], step_ns: float | None = None, count: int = SHOWN) -> list[int]:
    """Whole iterations in a row that every rank has.

    Args:
        timelines: one for each rank.
        step_ns: a typical step: of all such iterations those are chosen whose steps differ least
            from it. None: the last ones.
        count: how many iterations, fewer if there are no more.
    """
    lengths = {span.iteration: span.end_ns - span.start_ns for span in timelines[0].of("step")}
    common = _common(timelines)
    for wanted in range(count, 0, -1):
        rows = [range(first, first + wanted) for first in sorted(common, reverse=True)]
        whole = [row for row in rows if common.issuperset(row)]
        if whole:
            differs = lambda row: 0.0 if step_ns is None else max(abs(lengths[at] - step_ns) for at in row)  # noqa: E731
            return list(min(whole, key=differs))
    return []


def last_iterations(timelines: Sequence[Timeline], count: int) -> list[int]:
    """The last `count` whole iterations that every rank has, or fewer, whether or not they follow one another."""
    return sorted(_common(timelines))[-count:]


def _common(timelines: Sequence[Timeline]) -> set[int]:
    """The usual iterations that every rank has; where there is none, those that are merely whole."""
    for steps in (_usual_steps, _whole_steps):
        common = set.intersection(*({span.iteration for span in steps(timeline)} for timeline in timelines))
        if common:
            return common
    return set()


def _whole_steps(timeline: Timeline) -> list[Span]:
    """The steps without a pause. In a pause the run does something else, such as another arm's turn."""
    steps = timeline.of("step")
    usual_ns = median(span.end_ns - span.start_ns for span in steps) if steps else 0
    return [span for span in steps if span.end_ns - span.start_ns <= _UNUSUAL * usual_ns]


def _usual_steps(timeline: Timeline) -> list[Span]:
    """The whole steps that do not follow a pause: behind one, a step has its sums already."""
    whole = _whole_steps(timeline)
    pauses = {span.iteration for span in timeline.of("step")}.difference(span.iteration for span in whole)
    return [span for span in whole if span.iteration - 1 not in pauses]


def draw(
    plan: Plan,
    timelines: Sequence[Timeline],
    iterations: Sequence[int],
    links: Mapping[str, Sequence[LinkCount]] | None = None,
) -> facts.Timeline:
    """Some iterations of all ranks of a run, whose timelines have one clock.

    Args:
        plan: that they ran under.
        timelines: one for each rank.
        iterations: as `typical_iterations` gives them, one or more.
        links: the counts of each link, if they were sampled.
    """
    shown = set(iterations)
    steps = [span for span in timelines[0].of("step") if span.iteration in shown]
    begin_ns = min(span.start_ns for timeline in timelines for span in timeline.of("step") if span.iteration in shown)
    end_ns = max(span.end_ns for timeline in timelines for span in timeline.spans if span.iteration in shown)
    return facts.Timeline(
        iterations=[_us(at - begin_ns) for span in steps for at in (span.start_ns, span.end_ns)],
        ranks=[_bars(timeline.rank, plan, timeline, iterations, begin_ns) for timeline in timelines],
        links=[_link(name, counts, begin_ns, end_ns) for name, counts in (links or {}).items()],
    )


def draw_simulated(plan: Plan, timeline: Timeline, count: int) -> facts.RankBars | None:
    """The last `count` iterations of one simulated rank, from time 0; None if there are not so many."""
    iterations = typical_iterations([timeline], count=count)
    if len(iterations) < count:
        return None
    begin_ns = min(span.start_ns for span in timeline.of("step") if span.iteration in set(iterations))
    return _bars(-1, plan, timeline, iterations, begin_ns)


def _bars(rank: int, plan: Plan, timeline: Timeline, iterations: Sequence[int], begin_ns: int) -> facts.RankBars:
    place_of = {iteration: place for place, iteration in enumerate(iterations)}
    compute: set[tuple[int, int, int, int]] = set()
    ready: dict[tuple[int, int], int] = {}
    sent: dict[tuple[int, int], list[int]] = {}
    for span in timeline.spans:
        place = place_of.get(span.iteration)
        if place is None:
            continue
        if span.kind in facts.COMPUTE_KINDS:
            # tensors that were updated together are one bar
            subject = span.subject if span.kind in ("forward", "wait") else -1
            kind = facts.COMPUTE_KINDS.index(span.kind)
            compute.add((kind, subject, _us(span.start_ns - begin_ns), _us(span.end_ns - span.start_ns)))
        elif span.kind == "ready":
            ready[place, span.subject] = span.end_ns
        elif span.kind in ("send", "receive"):
            times = sent.setdefault((place, span.subject), [span.start_ns, span.end_ns, span.end_ns])
            times[0] = min(times[0], span.start_ns)
            times[1] = min(times[1], span.end_ns)
            times[2] = max(times[2], span.end_ns)
    messages = []
    for (place, message), (start_ns, left_ns, end_ns) in sent.items():
        ready_ns = max((ready.get((place, tensor), start_ns) for tensor in plan.messages[message].tensors), default=start_ns)
        at = [_us(each - begin_ns) for each in (min(ready_ns, start_ns), start_ns, left_ns, end_ns)]
        messages.append((at[1], message, place, at[1] - at[0], at[2] - at[1], at[3] - at[2]))
    # of two bars that start together the longer is the outer one
    bars = sorted(compute, key=lambda bar: (bar[2], -bar[3]))
    messages.sort()
    return facts.RankBars(
        rank,
        [
            [bar[0] for bar in bars],
            [bar[1] for bar in bars],
            _from_the_last([bar[2] for bar in bars]),
            [bar[3] for bar in bars],
        ],
        [[each[1] for each in messages], [each[2] for each in messages], _from_the_last([each[0] for each in messages])]
        + [[each[column] for each in messages] for column in (3, 4, 5)],
    )


def _from_the_last(starts: Sequence[int]) -> list[int]:
    return [start - before for before, start in pairwise([0, *starts])]


def _us(time_ns: int) -> int:
    return round(time_ns / 1000)


def _link(name: str, counts: Sequence[LinkCount], begin_ns: int, end_ns: int) -> facts.LinkFacts:
    samples: list[int] = []
    for before, count in pairwise(counts):
        if begin_ns <= count.at_ns and before.at_ns <= end_ns:
            megabits = (count.passed_bytes - before.passed_bytes) * 8e3 / max(1, count.at_ns - before.at_ns)
            samples += [_us(count.at_ns - begin_ns), round(megabits), count.queued_bytes]
    return facts.LinkFacts(name, samples)


def urgencies(plan: Plan, profile: Profile | None) -> list[int]:
    """How soon the next forward pass needs each message of a plan, by which all policies are coloured alike.

    A message's own priority would not do: policies that send first in, first out give none.

    Args:
        plan: of the messages.
        profile: of its tensors, in any order. None, or of other tensors: what is ready last is needed first.

    Returns:
        By message the rank of its most urgent tensor, 0 for the model's most urgent.
    """
    ranks = {spec.name: len(plan.tensors) - 1 - place for place, spec in enumerate(plan.tensors)}
    if profile is not None and ranks.keys() == {tensor.spec.name for tensor in profile.tensors}:
        ranks = {tensor.spec.name: rank for tensor, rank in zip(profile.tensors, profile.urgency(), strict=True)}
    return [min(ranks[plan.tensors[tensor].name] for tensor in message.tensors) for message in plan.messages]


def plan_facts(plan: Plan, profile: Profile | None) -> facts.PlanFacts:
    """A plan for its picture; `profile` as for `urgencies`."""
    first = [message for message, is_second in plan.starts if not is_second]
    order = first if plan.sequence is not None else _by_urgency(plan)
    place_of = {message: place for place, message in enumerate(order)}
    return facts.PlanFacts(
        headline=plan.describe(limit=0).partition("\n")[0],
        tensors=[(spec.name, spec.size_bytes) for spec in plan.tensors],
        messages=[
            (message.lane, urgency, place_of[index], plan.describe_message(index))
            for index, (message, urgency) in enumerate(zip(plan.messages, urgencies(plan, profile), strict=True))
        ],
        slices=[
            [number for piece in message.slices for number in (piece.tensor, piece.offset_bytes, piece.size_bytes)]
            for message in plan.messages
        ],
    )


def _by_urgency(plan: Plan) -> list[int]:
    return sorted(range(len(plan.messages)), key=lambda index: (plan.messages[index].priority, index))


def parts_of(timeline: Timeline, plan: Plan, profile: Profile, iterations: Collection[int] | None = None) -> facts.Parts | None:
    """Where the steps of a timeline go, with the waits by layer.

    Args:
        timeline, plan: what happened, under which plan.
        profile: has the layers of the plan's tensors.
        iterations: those whose steps count; None: all usual ones of a run that was measured.

    Returns:
        The mean of these steps; None if there is none.
    """
    if iterations is None:
        steps = _usual_steps(timeline)
    else:
        steps = [span for span in timeline.of("step") if span.iteration in iterations]
    if not steps:
        return None
    # by the time at which they happened: what an iteration left for the next one's forward pass
    # belongs to that step
    windows = union((span.start_ns, span.end_ns) for span in steps)
    layer_of = {tensor.spec.name: profile.layers[tensor.layer].name for tensor in profile.tensors}
    waited: dict[str, int] = defaultdict(int)
    for span in timeline.of("wait"):
        name = "all tensors" if span.subject < 0 else plan.tensors[span.subject].name
        waited[layer_of.get(name, name)] += _length(_within([(span.start_ns, span.end_ns)], windows))
    covered: list[tuple[int, int]] = []
    taken: dict[Kind, int] = {}
    # an update may run inside of a pass, and a wait inside of either: each time counts once
    for kind in _INNER_FIRST:
        both = union([*covered, *_within(((span.start_ns, span.end_ns) for span in timeline.of(kind)), windows)])
        taken[kind] = _length(both) - _length(covered)
        covered = both
    each = 1e6 * len(steps)
    most = sorted(waited.items(), key=lambda item: -item[1])[:_MOST_WAITED_FOR]
    return facts.Parts(
        iterations=len(steps),
        forward=taken["forward"] / each,
        backward=taken["backward"] / each,
        update=taken["update"] / each,
        wait=taken["wait"] / each,
        other=(_length(windows) - _length(covered)) / each,
        waited_for=[(name, took_ns / each) for name, took_ns in most if took_ns],
    )


def _within(intervals: Iterable[tuple[int, int]], windows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of `intervals` that lie in `windows`, both of start and end."""
    return [
        (max(start, first), min(end, last))
        for start, end in intervals
        for first, last in windows
        if start < last and first < end
    ]


def _length(intervals: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in intervals)


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which `part` of `values` lie, between the two nearest that were measured."""
    return float(np.quantile(values, part))
