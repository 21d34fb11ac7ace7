"""Files that mean harm: refused before they take time or memory, with a text that somebody can read."""

from __future__ import annotations

import gzip
import logging

import pytest
from msgspec import structs

from bench.hostile import NETWORK, apart, chakra, kineto, noun
from gradlane import policies, trace
from gradlane.core import files
from gradlane.core.cluster import Cluster, Worker
from gradlane.core.fields import MAX_MESSAGES
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.timeline import Timeline
from gradlane.errors import FormatError, InputError
from gradlane.lab.files import read_spec
from gradlane.sim import simulate_servers
from gradlane.testing.generators import planned, profile_of

HUGE = profile_of((0, 2**50))
SLICING = {
    "p3": "slice_bytes",
    "bytescheduler": "partition_bytes",
    "prophet": "partition_bytes",
    "geryon": "slice_bytes",
    "blocks": "most_bytes",
}


@pytest.mark.parametrize("name", SLICING)
def test_a_plan_of_too_many_messages_is_refused_with_their_number_and_the_knob_that_makes_them_fewer(name):
    knob = SLICING[name]
    with pytest.raises(
        InputError, match=rf"{knob}: got \d+, with which .* would travel in \d+ messages, expected at most 100000"
    ) as refused:
        policies.get(name).plan(HUGE, NETWORK)
    enough = int(str(refused.value).split(f"with {knob} = ")[1].split()[0])
    knobs = {"least_bytes": enough, "most_bytes": enough} if name == "blocks" else {knob: enough}
    assert 1 <= len(policies.get(name, **knobs).plan(HUGE, NETWORK).messages) <= MAX_MESSAGES


def test_a_plan_of_too_many_packets_is_refused_before_it_is_simulated():
    cluster = Cluster.homogeneous(2, 2, 10**9)
    cluster = structs.replace(cluster, workers=(Worker(0), Worker(1, 150)))  # unequal ones are simulated by packets
    with pytest.raises(InputError, match=r"packets: got .* servers, expected at most 1000000; .*packet_bytes above 30000"):
        simulate_servers(planned("mercury", HUGE, cluster), HUGE, cluster)


def test_the_exact_merge_refuses_more_tensors_than_it_has_time_for():
    many = profile_of(*[(0, 4)] * 2_001)
    with pytest.raises(InputError, match="got 2001 tensors, expected at most 2000"):
        policies.get("mg-wfbp-exact").plan(many, NETWORK)


def test_a_file_of_many_small_parts_is_refused_before_there_is_one_of_them():
    spans = b",".join([b'["send",0,0,0,0]'] * 1_000_001)
    with pytest.raises(FormatError, match="objects and lists, expected at most 1000000"):
        files.loads(noun("timeline", b'{"plan":"x","rank":0,"spans":[%s]}' % spans), Timeline)


def test_a_model_larger_than_one_message_may_be_is_refused():
    with pytest.raises(InputError, match="bytes together, as one message may have"):
        profile_of((0, 2**50), (0, 4))


LONG = b"x" * 100_000
QUOTED = {
    "a dtype": (Profile, b'{"model":"m","device":"d","tensors":[{"spec":{"name":"a","size_bytes":4,"dtype":"%s"}}]}' % LONG),
    "a wire": (Plan, b'{"policy":"p","model":"m","tensors":[],"messages":[],"wire":"%s"}' % LONG),
}


@pytest.mark.parametrize("name", QUOTED)
def test_what_is_quoted_of_a_file_is_short(name):
    kind, body = QUOTED[name]
    with pytest.raises(FormatError, match="xxx") as refused:
        files.loads(noun(kind.__name__.lower(), body), kind)
    assert len(str(refused.value)) < 1000


TRACES = {
    "empty events, compressed": (gzip.compress(kineto(*[b"{}"] * 2_100_000), 1), "JSON objects, expected at most 1200000"),
    "a shape of many lengths": (chakra(b",".join([b"9"] * 100_000)), "takes more than 10000 bytes to describe"),
    "a shape of long numbers": (chakra(b'"' + b"9" * 5000 + b'"'), "a gradient whose shape cannot be read"),
    "a shape whose product is long": (chakra(b",".join([b"1125899906842624"] * 60)), "a gradient of shape"),
    "a long shape in a profiler's trace": (
        kineto(
            b'{"ph":"X","name":"torch::autograd::AccumulateGrad","dur":1,"args":{"Input Dims":[[%s]]}}'
            % b",".join([b"1"] * 9_000)
        ),
        "takes more than 10000 bytes to describe",
    ),
    "lines without end": (b"node1 -- a -- forward_compute_time=\n" + b"\n" * 1_000_001, "more than 1000000 lines"),
    "a line that is nearly a node": (
        b"node1 -- a" + b" -- forward_compute_time=1, backward_compute_time=1, activation_size=1" * 130,
        "expected a node or an edge",
    ),
}


@pytest.mark.parametrize("name", TRACES)
def test_a_hostile_trace_is_refused_in_a_line_and_in_little_time(name, tmp_path):
    data, text = TRACES[name]
    path = tmp_path / "trace"
    path.write_bytes(data)
    outcome = apart(name, lambda: trace.read(path, compute_ns=1_000 if b"chakra" in data[:100] else None))
    assert text in outcome.said
    assert len(outcome.said) < 400
    assert outcome.fault == ""


def test_a_lab_spec_larger_than_any_is_refused(tmp_path):
    path = tmp_path / "lab.yaml"
    path.write_bytes(b"hosts: [" + b"[]," * 400_000 + b"]")
    with pytest.raises(FormatError, match="got more than 524288 bytes"):
        read_spec(path)


def test_a_file_beside_a_job_that_cannot_be_written_costs_a_line_and_nothing_is_left_of_it(tmp_path, caplog):
    (tmp_path / "there").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "gradlane"):
        files.leave(tmp_path / "there" / "profile.json", HUGE)
        (tmp_path / "taken.json").mkdir()
        files.leave(tmp_path / "taken.json", HUGE)
        files.leave(tmp_path / "new" / "profile.json", HUGE)
    assert [record.getMessage().partition(": ")[2].partition(",")[0] for record in caplog.records] == [
        f"{tmp_path / 'there' / 'profile.json'} was not written",
        f"{tmp_path / 'taken.json'} was not written",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "taken.json", "there"]
    assert files.read(tmp_path / "new" / "profile.json", type(HUGE)) == HUGE
