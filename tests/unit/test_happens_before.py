"""The engine of the checker of streams, held against reachability in an explicit graph."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane.testing.happens_before import Access, Memory, Timeline

TIMELINES, BYTES = 3, 6


@dataclass
class Step:
    timeline: int
    kind: str  # "read", "write", "event", or "wait"
    begin: int = 0
    end: int = 0
    event: int = 0


def program(seed: int, length: int) -> list[Step]:
    """Steps at random, which is much faster than to draw each; of one seed, a shorter program is the beginning of a longer."""
    random = Random(seed)
    steps: list[Step] = []
    events = 0
    while len(steps) < length:
        timeline, kind = random.randrange(TIMELINES), random.choice(("read", "write", "event", "wait"))
        if kind == "event":
            steps.append(Step(timeline, kind, event=events))
            events += 1
        elif kind != "wait":
            begin, end = sorted(random.sample(range(BYTES + 1), 2))
            steps.append(Step(timeline, kind, begin, end))
        elif events:
            steps.append(Step(timeline, kind, event=random.randrange(max(0, events - 3), events)))
    return steps


programs = st.builds(program, st.integers(0, 2**32), st.integers(4, 40))
many = settings(max_examples=200)


def order_of(steps: list[Step]) -> list[set[int]]:
    """For each step those that happen before it."""
    before: list[set[int]] = []
    for place, step in enumerate(steps):
        direct = [earlier for earlier in range(place) if steps[earlier].timeline == step.timeline]
        if step.kind == "wait":
            direct += [n for n in range(place) if steps[n].kind == "event" and steps[n].event == step.event]
        before.append(set(direct).union(*(before[earlier] for earlier in direct)))
    return before


def races_of(steps: list[Step]) -> list[set[tuple[int, int]]]:
    """For each step the bytes and the steps that race there: of all accesses since the last write, and that write."""
    before = order_of(steps)
    since: list[list[int]] = [[] for _ in range(BYTES)]
    found: list[set[tuple[int, int]]] = []
    for place, step in enumerate(steps):
        found.append(set())
        for byte in range(step.begin, step.end):
            against = [n for n in since[byte] if "write" in (step.kind, steps[n].kind)]
            found[-1] |= {(byte, n) for n in against if n not in before[place]}
            since[byte] = [place] if step.kind == "write" else [*since[byte], place]
    return found


def found_by_clocks(steps: list[Step]) -> list[set[tuple[int, int]]]:
    timelines = [Timeline(str(number)) for number in range(TIMELINES)]
    memory, events = Memory(), {}
    found: list[set[tuple[int, int]]] = []
    for place, step in enumerate(steps):
        timeline = timelines[step.timeline]
        found.append(set())
        if step.kind == "event":
            events[step.event] = timeline.now()
        elif step.kind == "wait":
            timeline.wait_for(events[step.event])
        else:
            access = Access(timeline, timeline.step(), str(place))
            conflicts = (memory.write if step.kind == "write" else memory.read)(step.begin, step.end, access, timeline.clock)
            found[-1] = {(n, int(c.access.operation)) for c in conflicts for n in range(c.begin, c.end)}
    return found


@many
@given(programs)
def test_the_races_found_are_those_of_the_graph(steps):
    for place, (found, expected) in enumerate(zip(found_by_clocks(steps), races_of(steps), strict=True)):
        # of several reads on one timeline the last stands for all: if it is before the write, so are they
        last = {(byte, steps[n].timeline, steps[n].kind): n for byte, n in sorted(expected)}
        assert found == {(byte, n) for (byte, _, _), n in last.items()}, (place, steps)


@many
@given(programs)
def test_none_is_found_exactly_if_every_two_accesses_in_conflict_are_ordered(steps):
    before = order_of(steps)
    unordered = any(
        max(one.begin, other.begin) < min(one.end, other.end)
        and "write" in (one.kind, other.kind)
        and first not in before[second]
        for second, other in enumerate(steps)
        for first, one in enumerate(steps[:second])
    )
    assert any(found_by_clocks(steps)) == unordered


@many
@given(programs, st.integers(0, TIMELINES - 1))
def test_freed_memory_is_as_good_as_written(steps, owner):
    """Free memory at the end: what is not over for its owner is what a write of all bytes would race with."""
    timelines = [Timeline(str(number)) for number in range(TIMELINES)]
    memory, events = Memory(), {}
    for place, step in enumerate(steps):
        timeline = timelines[step.timeline]
        if step.kind == "event":
            events[step.event] = timeline.now()
        elif step.kind == "wait":
            timeline.wait_for(events[step.event])
        else:
            access = Access(timeline, timeline.step(), str(place))
            (memory.write if step.kind == "write" else memory.read)(step.begin, step.end, access, timeline.clock)
    freed = {(n, int(c.access.operation)) for c in memory.free(timelines[owner].clock) for n in range(c.begin, c.end)}
    assert freed == found_by_clocks([*steps, Step(owner, "write", 0, BYTES)])[-1]


def test_the_place_of_an_access_is_named_from_the_inside_out():
    code = test_the_place_of_an_access_is_named_from_the_inside_out.__code__
    access = Access(Timeline("the host"), 1, "a write", ((code, 7), (code, 9)))
    assert str(access) == "a write on the host, at unit/test_happens_before.py:7 < unit/test_happens_before.py:9"
    assert str(Access(Timeline("the host"), 1, "a write")) == "a write on the host, at an unknown place"


@pytest.mark.parametrize(("begin", "end"), [(0, 2), (6, 8)])
def test_neighbours_do_not_race(begin, end):
    memory, one, other = Memory(), Timeline("one"), Timeline("other")
    assert memory.write(2, 6, Access(one, one.step(), "a"), one.clock) == []
    assert memory.write(begin, end, Access(other, other.step(), "b"), other.clock) == []
