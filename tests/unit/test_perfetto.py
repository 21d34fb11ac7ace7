from __future__ import annotations

import json
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane import policies
from gradlane.cli.compare import _chosen, _iterations
from gradlane.core.plan import Lane, Message, Plan, Slice
from gradlane.core.profile import TensorSpec
from gradlane.core.timeline import Span, Timeline
from gradlane.errors import InputError
from gradlane.report.perfetto import LinkCount, chrome_trace
from gradlane.sim import simulate
from gradlane.testing.generators import networks, profiles

PLAN = Plan(
    "test",
    "two",
    (TensorSpec("a", 8), TensorSpec("b", 1024)),
    (Message((Slice(0, 0, 8),), priority=1), Message((Slice(1, 0, 1024),), lane=1)),
    (Lane(), Lane()),
)


NAME = "message 0, priority 1, 8 B: a"


def timeline(*spans: Span, rank: int = 0, plan: Plan = PLAN) -> Timeline:
    return Timeline(plan.fingerprint, rank, spans)


def tracks(trace: bytes) -> dict[tuple[str, str], list[tuple[float, float, str]]]:
    """(process name, track name) -> its events as (ts, dur, name)."""
    events = json.loads(trace)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            track = processes[event["pid"]], threads[event["pid"], event["tid"]]
            found[track].append((event["ts"], event["dur"], event["name"]))
    return dict(found)


def test_one_rank_is_a_process_with_a_track_each_for_iterations_compute_and_lanes():
    trace = chrome_trace(
        [
            timeline(
                Span("step", 0, -1, 1_000, 9_500),
                Span("forward", 0, 0, 1_000, 2_000),
                Span("forward", 0, 1, 2_000, 2_500),
                Span("backward", 0, -1, 2_500, 6_500),
                Span("ready", 0, 0, 3_000, 3_000),
                Span("send", 0, 0, 3_000, 4_000),
                Span("send", 0, 1, 3_500, 9_000),
                Span("wait", 0, 1, 6_500, 9_000),
                Span("update", 0, 0, 9_000, 9_500),
                Span("update", 0, 1, 9_000, 9_500),
            )
        ],
        [PLAN],
        layers=["embedding"],
    )
    assert tracks(trace) == {
        ("rank 0", "iterations"): [(0.0, 8.5, "iteration 0")],
        ("rank 0", "compute"): [
            (0.0, 1.0, "forward embedding"),
            (1.0, 0.5, "forward of layer 1"),
            (1.5, 4.0, "backward"),
            (5.5, 2.5, "wait for b"),
            (8.0, 0.5, "update a and 1 more"),
        ],
        ("rank 0", "lane 0"): [(2.0, 1.0, "message 0, priority 1, 8 B: a")],
        ("rank 0", "lane 1"): [(2.5, 5.5, "message 1, priority 0, 1.0 KiB: b")],
    }


def test_overlapping_messages_of_a_lane_are_spread_over_tracks():
    sends = [
        Span("send", index, 0, start, end) for index, (start, end) in enumerate([(0, 10), (2, 5), (4, 12), (10, 20), (12, 13)])
    ]
    assert tracks(chrome_trace([timeline(*sends)], [PLAN])) == {
        ("rank 0", "lane 0"): [(0.0, 0.01, NAME), (0.01, 0.01, NAME)],
        ("rank 0", "lane 0 (2)"): [(0.002, 0.003, NAME), (0.012, 0.001, NAME)],
        ("rank 0", "lane 0 (3)"): [(0.004, 0.008, NAME)],
    }


def test_compute_that_nests_shares_a_track_and_what_crosses_does_not():
    spans = [
        Span("update", 0, 1, 0, 500),
        Span("forward", 0, -1, 0, 10_000),
        Span("wait", 0, 0, 2_000, 3_000),
        Span("update", 0, 0, 9_000, 11_000),
        Span("backward", 0, -1, 10_000, 20_000),
    ]
    assert tracks(chrome_trace([timeline(*spans)], [PLAN])) == {
        ("rank 0", "compute"): [
            (0.0, 10.0, "forward"),
            (0.0, 0.5, "update b"),
            (2.0, 1.0, "wait for a"),
            (10.0, 10.0, "backward"),
        ],
        ("rank 0", "compute (2)"): [(9.0, 2.0, "update a")],
    }


def test_runs_and_ranks_stand_side_by_side_under_their_names():
    one = Span("backward", 0, -1, 5_000, 6_000)
    ranks = [timeline(one, rank=rank) for rank in (0, 1)]
    trace = chrome_trace([*ranks, *ranks], [PLAN], ["ddp", "ddp", "blocks", "blocks"])
    names = {e["pid"]: e["args"]["name"] for e in json.loads(trace)["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "ddp rank 0", 1: "ddp rank 1", 2: "blocks rank 0", 3: "blocks rank 1"}
    assert all(events == [(0.0, 1.0, "backward")] for events in tracks(trace).values())


def test_each_timeline_begins_at_zero_unless_ranks_share_their_clock():
    early, late = timeline(Span("backward", 0, -1, 1_000, 2_000)), timeline(Span("backward", 0, -1, 4_000, 5_000), rank=1)
    apart = tracks(chrome_trace([early, late], [PLAN]))
    assert [events[0][0] for events in apart.values()] == [0.0, 0.0]
    together = tracks(chrome_trace([early, late], [PLAN], shared_clock=True))
    assert [events[0][0] for events in together.values()] == [0.0, 3.0]


def test_what_does_not_fit_together_is_refused():
    other = Plan("other", "two", PLAN.tensors, PLAN.messages, PLAN.lanes)
    with pytest.raises(InputError, match=f"got a timeline of plan {PLAN.fingerprint}, expected {other.fingerprint}"):
        chrome_trace([timeline()], [other])
    with pytest.raises(InputError, match="plans: got 2, expected 1 or 3"):
        chrome_trace([timeline(), timeline(rank=1), timeline(rank=2)], [PLAN, PLAN])
    with pytest.raises(InputError, match="labels: got 3, expected 1 or 2"):
        chrome_trace([timeline(), timeline(rank=1)], [PLAN], ["a", "b", "c"])
    with pytest.raises(InputError, match="got rank 1 of ddp again, expected it once"):
        chrome_trace([timeline(rank=1), timeline(rank=1)], [PLAN], ["ddp"])


@settings(max_examples=30, deadline=None)
@given(profile=profiles(max_tensors=10), network=networks(), name=st.sampled_from(policies.names("all-reduce")))
def test_the_trace_of_any_simulation_nests_on_every_track_and_loses_nothing(profile, network, name):
    plan = policies.get(name).plan(profile, network)
    simulated = simulate(plan, profile, network)
    found = tracks(chrome_trace([simulated], [plan]))
    for (_, track), events in found.items():
        ends: list[float] = []
        # in whole nanoseconds, so that nothing crosses by rounding
        for start, end in ((round(ts * 1000), round((ts + dur) * 1000)) for ts, dur, _ in events):
            assert 0 <= start <= end
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or (end <= ends[-1] and track.startswith("compute"))
            ends.append(end)
    sent = sum(len(events) for (_, track), events in found.items() if track.startswith("lane"))
    assert sent == len(simulated.of("send"))
    assert all(not track.startswith("compute (") for _, track in found)


def test_a_trace_of_nothing_is_a_trace():
    assert json.loads(chrome_trace([], [])) == {"traceEvents": [], "displayTimeUnit": "ms"}


def test_links_are_counters_of_rate_and_queue_for_as_long_as_the_run_went_on():
    counts = [LinkCount(at_ns, passed, queued) for at_ns, passed, queued in (
        (500_000, 0, 9), (1_000_000, 0, 7), (2_000_000, 125_000, 30_000), (4_000_000, 125_000, 0), (9_000_000, 500_000, 0),
    )]  # fmt: skip
    run = timeline(Span("step", 0, -1, 1_000_000, 5_000_000))
    events = json.loads(chrome_trace([run], [PLAN], ["wfbp"], shared_clock=True, links={"host0 up": counts}))["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    (process,) = [event for event in events if event["args"].get("name") == "wfbp links"]
    assert {event["pid"] for event in counters} == {process["pid"]}
    assert [(event["name"], event["ts"], *event["args"].values()) for event in counters] == [
        ("host0 up, Mbit/s", 0.0, 1000.0),
        ("host0 up, bytes queued", 1000.0, 30_000),
        ("host0 up, Mbit/s", 1000.0, 0.0),
        ("host0 up, bytes queued", 3000.0, 0),
    ]


def test_iterations_are_chosen_before_they_are_drawn():
    whole = timeline(*(Span("step", at, -1, 100 * at, 100 * at + 100) for at in range(8)))
    assert [span.iteration for span in whole.during(range(2, 4)).spans] == [2, 3]
    assert _chosen("4", [whole, whole.during(range(7))]) == [3, 4, 5, 6]
    assert list(_chosen("2..3", [whole])) == [2, 3]
    assert _chosen("all", [whole]) is None


@pytest.mark.parametrize("text", ["0", "-1", "3..2", "4..", "some", ""])
def test_iterations_that_are_none_are_refused(text):
    with pytest.raises(InputError, match=r"expected how many of the last ones \(1 or more\), FIRST..LAST, or all"):
        _iterations(text)


def test_links_are_shown_only_while_something_of_the_run_is():
    spans = [Span("step", at, -1, 1_000 * at, 1_000 * at + 400) for at in (0, 5)]
    counts = [LinkCount(100 * at, 10 * at, 0) for at in range(60)]
    events = json.loads(chrome_trace([timeline(*spans)], [PLAN], shared_clock=True, links={"up": counts}))["traceEvents"]
    shown = {event["ts"] for event in events if event["ph"] == "C" and event["name"] == "up, Mbit/s"}
    assert shown == {0, 0.1, 0.2, 0.3, 5.0, 5.1, 5.2, 5.3}
