from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane.core import files
from gradlane.core.bus import Bus
from gradlane.core.checks import check_plan
from gradlane.core.cluster import Cluster, Host, Link, RateStep, Server, Worker
from gradlane.core.network import ONE_BY_ONE, CostSegment, Network, Sharing
from gradlane.core.plan import Lane, Message, Plan, Slice
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.core.records.search_log import Choice, PolicyTrial, Predicted, SearchLog, SearchRound, Switch
from gradlane.core.records.tuned import KnobTrial, Tuned
from gradlane.core.timeline import Span, Timeline
from gradlane.errors import FormatError, InputError, PlanError
from gradlane.testing.generators import networks, plans, profiles

GOLDEN = Path(__file__).parent.parent / "golden"

NOUNS: dict[str, Any] = {
    "profile": Profile(
        "mlp",
        "cpu",
        (TensorProfile(TensorSpec("out.weight", 400, "float16"), 0, 1), TensorProfile(TensorSpec("in.weight", 1200), 2_000, 0)),
        (Layer("in", 1_000, 30), Layer("out", 500)),
        2_500,
        "written by hand",
        4_000,
    ),
    "network": Network(
        4,
        (CostSegment(50_000, 360_000_000, 8_192, 20_000), CostSegment(185_000, 486_000_000, latency_ns=74_000)),
        "ring",
        0.04,
        "written by hand",
        Sharing(max_in_flight=2, chunks=6, chunk_bytes=8_388_608, network_classes=2),
        min_message_ns=90_000,
        min_message_latency_ns=40_000,
        start_ns=35_000,
        wakeup_ns=120_000,
    ),
    "cluster": Cluster(
        (Host(Link(10**9, (RateStep(5_000, 10**8),)), Link(10**9)), Host(Link(2 * 10**9), Link(2 * 10**9))),
        (Worker(0), Worker(0, 150)),
        (Server(1, 2),),
        startup_ns=30_000,
        sum_bytes_per_second=10**10,
        network_classes=2,
        source="written by hand",
    ),
    "plan": Plan(
        "test",
        "mlp",
        (TensorSpec("out.weight", 400, "float16"), TensorSpec("in.weight", 1200)),
        (
            Message((Slice(0, 0, 400),), priority=1, lane=1, hold_until=1),
            Message((Slice(1, 0, 800),)),
            Message((Slice(1, 800, 400),)),
        ),
        (Lane(window_bytes=1_000), Lane(network_priority=7)),
        "packet-priority",
        True,
        (1, 2, 0),
    ),
    "timeline": Timeline(
        "0123456789abcdef",
        3,
        (
            Span("backward", 0, -1, 0, 2_500),
            Span("ready", 0, 1, 2_000, 2_000),
            Span("send", 0, 1, 2_000, 9_007_199_254_740_993),
        ),
    ),
    "tuned": Tuned(
        "p3",
        {"slice_bytes": 131_072},
        "mlp",
        "0f1e",
        2,
        "server",
        (KnobTrial({"slice_bytes": 160_000}, (1_200, 1_000, 1_100)), KnobTrial({"slice_bytes": 64}, (9_000,), cut=True)),
    ),
    "searchlog": SearchLog(
        "mlp",
        2,
        "any",
        Choice("ddp", backend="all-reduce"),
        (
            SearchRound(
                "the job has begun",
                5,
                40,
                25_000_000,
                (Predicted(Choice("blocks", {"window_bytes": 65_536}, 0, "server"), 1_000),),
                (PolicyTrial(Choice("ddp", backend="all-reduce"), (1_200, 1_100)),),
                Choice("blocks", {"window_bytes": 65_536}, 0, "server"),
                "auto keeps blocks",
            ),
        ),
        (Switch(12, 1_000_000, Choice("blocks", {"window_bytes": 65_536}, 0, "server")),),
    ),
}
every_noun = pytest.mark.parametrize("name", NOUNS)


@every_noun
def test_the_golden_file_reads_as_the_noun_and_the_noun_is_written_as_the_golden_bytes(name):
    golden = (GOLDEN / f"{name}.json").read_bytes()
    assert files.loads(golden, type(NOUNS[name])) == NOUNS[name]
    assert files.dumps(NOUNS[name]) == golden


def test_a_network_written_before_there_was_latency_has_none_and_carries_messages_one_by_one():
    old = files.loads((GOLDEN / "network-without-latency.json").read_bytes(), Network)
    assert [piece.latency_ns for piece in old.segments] == [0, 0]
    assert old.sharing == ONE_BY_ONE
    assert old.min_message_ns == old.min_message_latency_ns == 0
    assert old.stream_ns(486_000, 10) == 10 * old.cost_ns(486_000) == 11_850_000


def test_a_profile_written_before_there_was_uncovered_time_has_none():
    old = files.loads((GOLDEN / "profile-without-uncovered.json").read_bytes(), Profile)
    assert old == msgspec.structs.replace(NOUNS["profile"], uncovered_ns=0)


BUS = Bus(8, 3_400, 120_000_000_000, 1_048_576, "written by hand", 1_200)
HOSTED = {
    "network": msgspec.structs.replace(NOUNS["network"], workers=32, bus=BUS),
    "cluster": Cluster(
        (Host(Link(10**9), Link(10**9)),) * 2, tuple(Worker(index // 8) for index in range(16)), (Server(0),), bus=BUS
    ),
}


@pytest.mark.parametrize("name", HOSTED)
def test_hosts_of_several_devices_are_written_with_their_bus_and_others_without(name):
    golden = (GOLDEN / f"{name}-of-hosts.json").read_bytes()
    assert files.loads(golden, type(HOSTED[name])) == HOSTED[name]
    assert files.dumps(HOSTED[name]) == golden
    assert b'"bus"' not in files.dumps(NOUNS[name])
    with pytest.raises(FormatError, match=r"devices: got 1, expected an integer from 2 to 1024.*\$\.body\.bus"):
        files.loads(golden.replace(b'"devices":8', b'"devices":1'), type(HOSTED[name]))


def test_the_fingerprint_of_the_golden_plan_is_what_it_was():
    # a change of it would make two releases refuse each other's plans
    assert NOUNS["plan"].fingerprint == "547645e3a4c7f942"


def test_a_plan_that_names_no_backend_is_written_without_one_and_one_that_does_reads_back_with_it():
    plan = NOUNS["plan"]
    named = msgspec.structs.replace(plan, backend="server")
    assert b'"backend"' not in files.dumps(plan)
    assert files.loads(files.dumps(named), Plan) == named
    assert named.fingerprint != plan.fingerprint
    with pytest.raises(FormatError, match="backend"):
        files.loads(files.dumps(named).replace(b'"server"', b'"nccl"'), Plan)


@settings(max_examples=30, deadline=None)
@given(noun=st.one_of(profiles(), networks(), plans()))
def test_what_is_written_reads_back_equal(noun):
    read = files.loads(files.dumps(noun), type(noun))
    assert read == noun
    assert files.dumps(read) == files.dumps(noun)


@every_noun
def test_a_file_is_written_whole_and_leaves_nothing_beside_it(name, tmp_path):
    files.write(tmp_path / "noun.json", NOUNS[name])
    assert files.read(tmp_path / "noun.json", type(NOUNS[name])) == NOUNS[name]
    assert [path.name for path in tmp_path.iterdir()] == ["noun.json"]


def test_a_missing_file_stays_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "absent.json", Profile)


# -- refusals ---------------------------------------------------------------------------------------------


def edited(name: str, *place: str | int, to: object) -> bytes:
    """The file of the noun with one value changed or added."""
    tree = json.loads(files.dumps(NOUNS[name]))
    *way, last = place
    node = tree
    for key in way:
        node = node[key]
    node[last] = to
    return json.dumps(tree).encode()


NAN, INFINITE = float("nan"), float("inf")


def body(name: str, *place: str | int, to: object) -> bytes:
    return edited(name, "body", *place, to=to)


@pytest.mark.parametrize(
    ("data", "name", "fault", "path"),
    [
        (edited("profile", "format", to="gradlane.plan"), "profile", "got a 'gradlane.plan', expected a", "$.format"),
        (edited("profile", "format", to="x" * 10**6), "profile", "got a 'xxx", "$.format"),
        (edited("profile", "version", to=2), "profile", "got version 2, expected 1", "$.version"),
        (edited("profile", "comment", to=""), "profile", "got the unknown field 'comment'", "$"),
        (body("profile", "speed", to=1), "profile", "got the unknown field 'speed'", "$.body"),
        (body("profile", "tensors", 1, "spec", "grad", to=1), "profile", "'grad'", "$.body.tensors[1].spec"),
        (body("profile", "backward_ns", to=-1), "profile", "backward_ns: got -1, expected an integer", "$.body"),
        (body("profile", "backward_ns", to=True), "profile", "got a value of type bool, expected int", "$.body.backward_ns"),
        (body("profile", "backward_ns", to="1"), "profile", "got a value of type str, expected int", "$.body.backward_ns"),
        (body("profile", "backward_ns", to=1.5), "profile", "got a value of type float, expected int", "$.body.backward_ns"),
        (body("profile", "backward_ns", to=10**18 + 1), "profile", "backward_ns: got", "$.body"),
        (body("profile", "backward_ns", to=10**300), "profile", "backward_ns: got 10{79}, expected an integer", "$.body"),
        (body("profile", "backward_ns", to=1_999), "profile", "got 1999, expected the last ready_ns", "$.body"),
        (body("profile", "tensors", to=[]), "profile", "tensors: got 0, expected 1 to 100000", "$.body"),
        (body("profile", "tensors", 0, "ready_ns", to=3_000), "profile", "at least the 3000 of the tensor", "$.body"),
        (body("profile", "tensors", 0, "layer", to=2), "profile", r"tensors\[0\].layer: got 2, expected below 2", "$.body"),
        (body("profile", "tensors", 1, "spec", "name", to="out.weight"), "profile", "distinct names", "$.body"),
        (body("profile", "tensors", 1, "spec", "name", to=""), "profile", "name: got ''", "$.body.tensors[1].spec"),
        (body("profile", "tensors", 1, "spec", "name", to="a\nb"), "profile", "printable", "$.body.tensors[1].spec"),
        (body("profile", "tensors", 1, "spec", "size_bytes", to=3), "profile", "multiple of the 4", "$.body.tensors[1].spec"),
        (body("profile", "tensors", 1, "spec", "size_bytes", to=0), "profile", "size_bytes: got 0", "$.body.tensors[1].spec"),
        (body("profile", "tensors", 1, "spec", "dtype", to="int8"), "profile", "dtype: got 'int8'", "$.body.tensors[1].spec"),
        (body("network", "pieces", to=[]), "network", "1 to 16 of them", "$.body"),
        (body("network", "workers", to=0), "network", "workers: got 0", "$.body"),
        (body("network", "residual", to=-0.1), "network", "residual: got -0.1", "$.body"),
        (body("network", "residual", to=NAN), "network", "malformed", "$"),
        (body("network", "residual", to=INFINITE), "network", "malformed", "$"),
        (body("network", "residual", to=None), "network", "got a value of type null, expected float", "$.body.residual"),
        (body("network", "pieces", 0, "bytes_per_second", to=0), "network", "bytes_per_second: got 0", "$.body.pieces[0]"),
        (body("network", "pieces", 0, "up_to_bytes", to=2**50), "network", "ascending up_to_bytes", "$.body"),
        (body("network", "pieces", 1, "up_to_bytes", to=2**49), "network", "a last piece without limit", "$.body"),
        (body("plan", "messages", to=[]), "plan", "messages: got 0", "$.body"),
        (body("plan", "messages", 1, "slices", to=[]), "plan", "1 or more slices", "$.body.messages[1]"),
        (body("plan", "messages", 1, "slices", to=[[1, 0]]), "plan", "at least length 3", "$.body.messages[1].slices[0]"),
        (body("plan", "messages", 1, "slices", to=[[1, 0, 4, 4]]), "plan", "at most length 3", "$.body"),
        (body("plan", "messages", 1, "slices", to=[[1, -4, 4]]), "plan", "offset_bytes: got", "$.body.messages[1].slices[0]"),
        (body("plan", "messages", 1, "slices", to=[[1, 0, 2**60]]), "plan", "size_bytes: got", "$.body.messages[1].slices[0]"),
        (body("plan", "messages", 1, "slices", to=[[10**9, 0, 4]]), "plan", "tensor: got 10", "$.body.messages[1].slices[0]"),
        (body("plan", "messages", 1, "lane", to=2), "plan", r"messages\[1\].lane: got 2, expected below 2", "$.body"),
        (body("plan", "messages", 1, "hold_until", to=2), "plan", r"messages\[1\].hold_until: got 2", "$.body"),
        (body("plan", "lanes", to=[]), "plan", "lanes: got 0", "$.body"),
        (body("plan", "lanes", 0, "window_bytes", to=0), "plan", "window_bytes: got 0", "$.body.lanes[0]"),
        (body("plan", "wire", to="lifo"), "plan", "got 'lifo', expected a value that gradlane knows there", "$.body.wire"),
        (body("plan", "sequence", to=[0, 1]), "plan", "each of the 3 messages once", "$.body"),
        (body("plan", "sequence", to=[0, 1, 1]), "plan", "each of the 3 messages once", "$.body"),
        (body("plan", "sequence", to=[0, 1, 10**9]), "plan", "each of the 3 messages once", "$.body"),
        (body("plan", "crosses_barrier", to=1), "plan", "got a value of type int, expected bool", "$.body.crosses_barrier"),
        (body("timeline", "spans", to=[["send", 0, 1, 5, 4]]), "timeline", "end_ns: got 4", "$.body.spans[0]"),
        (body("timeline", "spans", to=[["sleep", 0, 1, 4, 5]]), "timeline", "got 'sleep', expected", "$.body.spans[0][0]"),
        (body("timeline", "spans", to=[["send", 0, -2, 4, 5]]), "timeline", "subject: got -2", "$.body.spans[0]"),
        (body("timeline", "rank", to=-1), "timeline", "rank: got -1", "$.body"),
        (body("plan", "messages", 0, "slices", 0, 0, to=99), "plan", r"messages\[0\]: got tensor 99, expected below", "$.body"),
        (b"", "profile", "got an empty file, expected a 'gradlane.profile' file", "$"),
        (b"null", "profile", "got a value of type null, expected object", "$"),
        (b"[" * 100_000, "profile", "got a value of type array, expected object", "$"),
        (b'{"x":' * 100_000, "profile", "got no JSON", "$"),
        (body("profile", "model", to="mlp").replace(b"mlp", b"m\x80p"), "profile", "got no JSON .*(byte 0x80|UTF-8)", "$.body"),
        (b"\xff\xfe", "profile", "got no JSON", "$"),
        (b'{"format":"gradlane.profile","version":1}', "profile", "got an object without 'body'", "$"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_the_place(data, name, fault, path):
    with pytest.raises(FormatError, match=f"(?s).*{fault}") as caught:
        files.loads(data, type(NOUNS[name]))
    assert caught.value.path == path
    assert len(str(caught.value)) < 700


def test_a_file_above_64_mib_is_refused_before_it_is_parsed():
    with pytest.raises(FormatError, match="got 67108865 bytes, expected at most 67108864"):
        files.loads(b" " * (64 * 2**20 + 1), Profile)


def test_a_file_cannot_claim_more_tensors_than_the_limit():
    tensors = ",".join(f'{{"name":"t{index}","size_bytes":4}}' for index in range(100_001))
    body = f'{{"policy":"p","model":"m","tensors":[{tensors}],"messages":[{{"slices":[[0,0,4]]}}]}}'
    with pytest.raises(FormatError, match="tensors: got 100001, expected 1 to 100000"):
        files.loads(f'{{"format":"gradlane.plan","version":1,"body":{body}}}'.encode(), Plan)


@every_noun
def test_a_truncated_file_is_refused_wherever_it_ends(name):
    golden = (GOLDEN / f"{name}.json").read_bytes()
    for length in range(len(golden)):
        with pytest.raises(FormatError):
            files.loads(golden[:length], type(NOUNS[name]))


def test_a_plan_from_a_file_for_another_model_is_refused_by_name():
    plan = files.loads((GOLDEN / "plan.json").read_bytes(), Plan)
    with pytest.raises(PlanError, match=r"tensor 1 is in.weight \(1200 B, float32\) in the plan and in.bias \(40 B, float32\)"):
        check_plan(plan, (TensorSpec("out.weight", 400, "float16"), TensorSpec("in.bias", 40)))


@pytest.mark.parametrize(
    "build",
    [
        lambda: TensorSpec("a", True),
        lambda: TensorSpec("a", 4.0),
        lambda: TensorSpec("", 4),
        lambda: TensorSpec("a", 4, "float8"),
        lambda: Layer("a", -1),
        lambda: Network.line(0, 1, 1),
        lambda: Network.line(2, 1, 0),
        lambda: Network(2, (CostSegment(1, 1),), residual=NAN),
        lambda: Slice(0, 0, 0),
        lambda: Lane(0),
        lambda: Message(()),
        lambda: Span("send", 0, 0, 2, 1),
    ],
)
def test_a_value_of_no_use_is_refused_in_code_as_in_a_file(build):
    with pytest.raises(InputError, match=r"got .*, expected"):
        build()


# -- fuzz ---------------------------------------------------------------------------------------------------


def outcome_of(data: bytes, name: str) -> str:
    """ "refused", with a FormatError; "same", the noun of the golden file; or "another", which writes and reads back equal."""
    kind = type(NOUNS[name])
    try:
        noun = files.loads(data, kind)
    except FormatError:
        return "refused"
    assert files.loads(files.dumps(noun), kind) == noun
    assert msgspec.structs.replace(noun) == noun  # which the constructor's checks have seen
    return "same" if noun == NOUNS[name] else "another"


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=200), name=st.sampled_from(sorted(NOUNS)))
def test_random_bytes_are_refused_alone_as_a_body_and_as_a_string_in_one(data, name):
    head = f'{{"format":"gradlane.{name}","version":1,"body":'.encode()
    for file in (data, head + data + b"}", head + b'{"policy":"' + data + b'"}}'):
        with pytest.raises(FormatError):
            files.loads(file, type(NOUNS[name]))


DAMAGE = [b"-", b"0", b"9" * 30, b"1e999", b"null", b"true", b"NaN", b'"', b"[", b"{}", b"\\ud800", b"\xed\xa0\x80"]


def test_a_damaged_file_is_refused_or_is_a_valid_noun():
    outcomes: Counter[str] = Counter()

    @settings(max_examples=250, deadline=None)
    @given(
        name=st.sampled_from(sorted(NOUNS)),
        edits=st.lists(
            st.tuples(
                st.integers(0, 2000),
                st.integers(0, 4),
                st.one_of(st.binary(max_size=3), st.sampled_from(DAMAGE)),
            ),
            max_size=2,
        ),
        digits=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 9)), max_size=2),
    )
    def damage(name, edits, digits):
        data = (GOLDEN / f"{name}.json").read_bytes()
        for place, digit in digits:
            places = [found.start() for found in re.finditer(rb"\d", data)]
            place = places[place % len(places)]
            data = data[:place] + b"%d" % digit + data[place + 1 :]
        for place, removed, inserted in edits:
            place %= len(data)
            data = data[:place] + inserted + data[place + removed :]
        outcomes[outcome_of(data, name)] += 1

    damage()
    # the examples reach both sides, or they would say nothing
    assert outcomes["refused"] > 50, outcomes
    assert outcomes["another"] > 10, outcomes


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)
LIKE = {bool: st.booleans(), int: st.integers(-1, 10**6), float: st.floats(-1, 2), str: st.text(max_size=5)}


def test_a_file_with_another_value_anywhere_is_refused_or_is_a_valid_noun():
    outcomes: Counter[str] = Counter()

    @settings(max_examples=200, deadline=None)
    @given(name=st.sampled_from(sorted(NOUNS)), data=st.data())
    def change(name, data):
        tree = node = json.loads((GOLDEN / f"{name}.json").read_bytes())
        while True:
            key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
            if isinstance(node[key], (dict, list)) and node[key] and data.draw(st.integers(0, 5)):
                node = node[key]
            else:
                like = LIKE.get(type(node[key]), JSON)
                node[key] = data.draw(like if data.draw(st.integers(0, 3)) else JSON)
                break
        outcomes[outcome_of(json.dumps(tree).encode(), name)] += 1

    change()
    assert outcomes["refused"] > 50, outcomes
    assert outcomes["another"] > 10, outcomes
