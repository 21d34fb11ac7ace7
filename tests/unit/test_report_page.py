"""The report's facts, and the file that they are put into."""

from __future__ import annotations

import base64
import itertools
import re
import statistics
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane import policies, zoo
from gradlane.cli import reports
from gradlane.compare.arms import ArmSpec, file_of
from gradlane.compare.records import Cell, Comparison, Result, Sweep
from gradlane.compare.runner import Trial
from gradlane.core import files
from gradlane.core.bus import Bus
from gradlane.core.cluster import Cluster, Host, Link, Server, Worker
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.timeline import Span, Timeline
from gradlane.errors import InputError
from gradlane.planning.plans import make_plan
from gradlane.planning.questions import Case, judge, sweep
from gradlane.report.page import Facts, facts, read_run, render_page
from gradlane.report.page.drawing import draw, parts_of, plan_facts, quantile, typical_iterations, urgencies
from gradlane.report.page.launched import files_of_job, of_launch
from gradlane.report.page.run_folder import files_of_run
from gradlane.report.page.simulated import simulated_arm
from gradlane.sim import simulate
from tests.commands import invoke

PROFILE = zoo.profile("alexnet")
NETWORK = Network.line(4, 50_000, 10**9)


def simulated(policy: str) -> tuple[Plan, Timeline]:
    plan = make_plan(policies.get(policy), PROFILE, Place(NETWORK))
    return plan, simulate(plan, PROFILE, NETWORK)


@pytest.mark.parametrize("policy", ["ddp", "wfbp", "bytescheduler", "blocks"])
def test_each_message_is_drawn_once_an_iteration_and_in_its_order(policy: str) -> None:
    plan, timeline = simulated(policy)
    iterations = typical_iterations([timeline])
    drawn = draw(plan, [timeline], iterations)
    messages, places, *times = drawn.ranks[0].messages
    each = [(iteration, message) for iteration in range(len(iterations)) for message in range(len(plan.messages))]
    assert sorted(zip(places, messages, strict=True)) == each
    assert all(time >= 0 for column in times for time in column)
    sends = {(span.iteration, span.subject): span for span in timeline.of("send")}
    begin_ns = min(span.start_ns for span in timeline.of("step") if span.iteration in iterations)
    for place, message, start in zip(places, messages, itertools.accumulate(times[0]), strict=True):
        assert start == pytest.approx((sends[iterations[place], message].start_ns - begin_ns) / 1e3, abs=1)
    lengths = [end - start for start, end in zip(drawn.iterations[::2], drawn.iterations[1::2], strict=True)]
    steps = {span.iteration: span.end_ns - span.start_ns for span in timeline.of("step")}
    assert lengths == [pytest.approx(steps[at] / 1e3, abs=1) for at in iterations]


@pytest.mark.parametrize("policy", ["ddp", "bytescheduler"])
def test_the_parts_of_a_step_are_the_step(policy: str) -> None:
    plan, timeline = simulated(policy)
    parts = parts_of(timeline, plan, PROFILE)
    assert parts is not None
    step_ms = statistics.mean(timeline.iteration_ns()) / 1e6
    assert parts.forward + parts.backward + parts.update + parts.wait + parts.other == pytest.approx(step_ms)
    assert sum(took for _, took in parts.waited_for) <= parts.wait + 1e-9


PLACES = {
    "all-reduce": NETWORK,
    "hosts of several devices": Network(8, NETWORK.segments, start_ns=20_000, bus=Bus(2, 5_000, 10**10)),
    "servers": Cluster.homogeneous(4, 4, 10**9, colocated=True, startup_ns=20_000),
    "two workers a host": Cluster.homogeneous(4, 2, 10**9, colocated=True, devices=2),
    "uneven hosts": Cluster(
        (Host(Link(10**9), Link(5 * 10**8)), Host(Link(2 * 10**8), Link(10**9))),
        (Worker(0), Worker(1, 150), Worker(1)),
        (Server(0),),
        packet_bytes=200_000,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES.values(), ids=PLACES)
def test_the_bar_of_a_policy_is_as_long_as_its_iteration_in_the_table(where: Network | Cluster) -> None:
    profile = zoo.profile("mobilenet")
    case = Case(profile, where, whole=where == PLACES["two workers a host"])
    outcomes = sweep([case])
    trial = reports.of_case("mobilenet", outcomes, [])
    assert [arm.name for arm in trial.arms] == list(case.policies)
    for arm, outcome in zip(trial.arms, outcomes, strict=True):
        parts = arm.parts
        assert parts is not None
        total_ms = parts.forward + parts.backward + parts.update + parts.wait + parts.other
        assert total_ms == pytest.approx(outcome.iteration_ns / 1e6, abs=1e-5), arm.name
        assert total_ms == pytest.approx(arm.predicted_ms, abs=1e-5), arm.name


def test_of_a_case_ddp_is_the_baseline_the_fastest_is_recommended_and_the_limit_is_the_bounds() -> None:
    ddp, blocks, wfbp = outcomes = [judge(policies.get(name), Case(PROFILE, NETWORK)) for name in ("ddp", "blocks", "wfbp")]
    assert wfbp.iteration_ns < min(ddp.iteration_ns, blocks.iteration_ns)
    trial = reports.of_case("alexnet", outcomes, ["a remark"])
    assert trial.remarks == ["a remark"]
    assert (trial.baseline, trial.recommended) == ("ddp", "wfbp")
    assert trial.limit == ddp.iteration_ns / ddp.bound_ns
    assert trial.limit >= max(arm.speedup[0] for arm in trial.arms if arm.speedup is not None)
    assert reports.of_case("alexnet", outcomes, [], "blocks was asked for", blocks).recommended == "blocks"
    assert reports.of_case("alexnet", [blocks, wfbp], []).limit is None


@pytest.mark.parametrize("policy", ["ddp", "wfbp", "tictac", "blocks"])
def test_a_message_is_coloured_by_what_the_forward_pass_needs_first(policy: str) -> None:
    # DDP and wfbp have no priorities, and send what is needed last first
    plan = make_plan(policies.get(policy), PROFILE, Place(NETWORK))
    layer_of = [PROFILE.tensors[min(message.tensors, key=PROFILE.urgency().__getitem__)].layer for message in plan.messages]
    urgency = [message[1] for message in plan_facts(plan, PROFILE).messages]
    assert sorted(range(len(layer_of)), key=urgency.__getitem__) == sorted(
        range(len(layer_of)), key=lambda message: (layer_of[message], urgency[message])
    )
    assert urgency[-1] == 0 if policy in ("ddp", "wfbp") else 0 in urgency
    # without a profile, what is ready last is needed first
    assert urgencies(plan, None) == [min(len(plan.tensors) - 1 - tensor for tensor in m.tensors) for m in plan.messages]


@settings(deadline=None)
@given(st.lists(st.integers(90, 110), min_size=1, max_size=12), st.integers(90, 110), st.data())
def test_the_iterations_shown_are_neighbours_and_as_long_as_a_typical_step(lengths: list[int], typical: int, data: Any) -> None:
    ends = [sum(lengths[: at + 1]) for at in range(len(lengths))]
    spans = [Span("step", at, -1, end - length, end) for at, (end, length) in enumerate(zip(ends, lengths, strict=True))]
    missing = data.draw(st.sets(st.integers(0, len(lengths) - 1), max_size=len(lengths) - 1))
    other = Timeline("p", 1, tuple(span for span in spans if span.iteration not in missing))
    shown = typical_iterations([Timeline("p", 0, tuple(spans)), other], typical)
    there = [at for at in range(len(lengths)) if at not in missing]
    pairs = [(at, at + 1) for at in there if at + 1 in there] or [(at,) for at in there]
    differs = {pair: max(abs(lengths[at] - typical) for at in pair) for pair in pairs}
    assert tuple(shown) in differs
    assert differs[tuple(shown)] == min(differs.values())


def test_a_step_with_another_arms_turn_in_it_is_left_out() -> None:
    spans = tuple(Span("step", at, -1, 100 * at, 100 * at + (5000 if at == 3 else 100)) for at in range(5))
    assert typical_iterations([Timeline("p", 0, spans)], 5000.0) == [1, 2]


def test_neither_a_pause_nor_the_step_behind_it_counts_where_a_steps_time_goes() -> None:
    plan, _ = simulated("wfbp")
    lengths = {0: 100, 1: 100, 2: 5000, 3: 30, 4: 100, 5: 100}
    ends = itertools.accumulate(lengths.values())
    spans = [
        span
        for (at, length), end in zip(lengths.items(), ends, strict=True)
        for span in (
            Span("step", at, -1, end - length, end),
            Span("forward", at, -1, end - length, end - length + min(length, 40) // 2),
        )
    ]
    timeline = Timeline("wfbp", 0, tuple(spans))
    parts = parts_of(timeline, plan, PROFILE)
    assert parts is not None
    assert (parts.iterations, parts.forward, parts.other) == (4, 20e-6, 80e-6)
    assert typical_iterations([timeline], 30.0) == [4, 5]


def test_a_plan_as_a_picture_has_every_byte_once() -> None:
    plan, _ = simulated("blocks")
    picture = plan_facts(plan, PROFILE)
    carried = sum(sum(slices[2::3]) for slices in picture.slices)
    assert carried == sum(size for _, size in picture.tensors) == plan.size_bytes
    assert sorted(message[2] for message in picture.messages) == list(range(len(plan.messages)))


def page_of(text: str) -> str:
    plan, timeline = simulated("wfbp")
    hostile = msgspec.structs.replace(plan_facts(plan, PROFILE), headline=text)
    arm = facts.ArmFacts(text, text, [[1.0]], 1.0, 1.0, 1.0, plan=hostile, timeline=draw(plan, [timeline], [1, 2]))
    trial = facts.TrialFacts(text, text, text, text, [(text, 1.0)], [text], [arm], [text])
    return render_page(Facts(text, [(text, text)], [trial])).decode()


@pytest.mark.parametrize("text", ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "]]>\"'&<!--"])
def test_what_files_say_is_never_html(text: str) -> None:
    assert text not in page_of(text)
    assert page_of(text).count("<script") == page_of("plain").count("<script")


def test_the_page_holds_the_facts_and_asks_the_network_for_nothing() -> None:
    page = page_of("plain")
    found = re.search(r'<script id="data" type="application/octet-stream">([^<]*)</script>', page)
    assert found is not None
    data = msgspec.json.decode(zlib.decompress(base64.b64decode(found.group(1))))
    assert data["facts"]["trials"][0]["arms"][0]["name"] == "plain"
    assert not re.search(r"""<(?:link|img|iframe)\b|\bsrc=|@import|url\(|\bfetch\(|XMLHttpRequest|\bimport\(""", page)


@pytest.mark.parametrize("measured", [True, False])
def test_what_ranks_left_is_a_report_with_the_simulator_beside_it_where_it_was_measured(tmp_path: Path, measured: bool) -> None:
    plan, timeline = simulated("blocks")
    for rank in range(2):
        files.write(tmp_path / f"timeline-rank{rank}.json", msgspec.structs.replace(timeline, rank=rank))
        files.write(tmp_path / f"plan-rank{rank}.json", plan)
    if measured:
        files.write(tmp_path / "profile.json", PROFILE)
        files.write(tmp_path / "network.json", NETWORK)
    (trial,) = read_run(tmp_path).trials
    (arm,) = trial.arms
    assert arm.timeline is not None
    assert [rank.rank for rank in arm.timeline.ranks] == [0, 1]
    assert arm.turns_ms == [[took / 1e6 for took in timeline.iteration_ns()]]
    assert (arm.parts is not None) == measured
    if measured:
        assert arm.predicted_ms == pytest.approx(timeline.iteration_ns()[-1] / 1e6, rel=0.01)
        assert arm.timeline.simulated is not None


def test_a_folder_that_nobody_ran_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected what `gradlane compare --out` or `gradlane launch --timeline` left"):
        read_run(tmp_path)


def leave_a_comparison(folder: Path) -> None:
    """As much of what `compare` leaves as is read before an arm's plan."""
    result = Result("blocks", (10**6, 10**6))
    comparison = Comparison("gradlane compare", "here", 2, None, "alexnet", 4, 1, None, "", (result,))
    (folder / "comparison.json").write_bytes(comparison.to_json())
    (folder / "config.json").write_bytes(b'{"arms": []}')
    (folder / "rank-0.json").write_bytes(b'{"arms": {"no-communication": {"step_ns": [5]}}, "all_reduce_ns": [5], "turns": 1}')
    files.write(folder / "profile-rank0.json", PROFILE)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("comparison.json", b"{", "got no JSON"),
        ("config.json", None, "got no file that can be read (No such file or directory)"),
        ("config.json", b"{}", "got an object without 'arms'"),
        ("rank-0.json", b"", "got no JSON"),
        ("rank-0.json", b'{"arms": {}, "all_reduce_ns": [5], "turns": 1}', "expected 'no-communication' among them"),
        (
            "rank-0.json",
            b'{"arms": {"no-communication": {"step_ns": []}}, "all_reduce_ns": [5], "turns": 1}',
            "step_ns: got 'no steps'",
        ),
        (
            "rank-0.json",
            b'{"arms": {"no-communication": {"step_ns": [5]}}, "all_reduce_ns": [], "turns": 1}',
            "all_reduce_ns: got 'no times'",
        ),
        (
            "rank-0.json",
            b'{"arms": {"no-communication": {"step_ns": [5]}}, "all_reduce_ns": [5], "turns": 0}',
            "turns: got 0, expected an integer from 1",
        ),
        ("profile-rank0.json", None, "got no file that can be read"),
        ("profile-rank0.json", files.dumps(PROFILE.stretched(0)), "got a profile whose steps take no time"),
        ("plan-blocks-rank0.json", None, "got no file that can be read"),
        ("plan-blocks-rank0.json", files.dumps(simulated("ddp")[0]), "expected the one that a timeline beside it is of"),
        ("timeline-blocks-rank0.json", None, "got no file that can be read"),
    ],
)
def test_a_file_of_a_comparison_that_is_damaged_or_not_there_is_named(
    tmp_path: Path, name: str, content: bytes | None, fault: str
) -> None:
    leave_a_comparison(tmp_path)
    if name.startswith("plan"):
        files.write(tmp_path / "timeline-blocks-rank0.json", simulated("blocks")[1])
    if content is None:
        (tmp_path / name).unlink(missing_ok=True)
    else:
        (tmp_path / name).write_bytes(content)
    assert invoke("report", tmp_path, code=2).startswith(f"gradlane: {tmp_path / name}: ")
    assert fault in invoke("report", tmp_path, code=2)


@pytest.mark.parametrize("model", ["meta-llama/Llama-3-8B", "../../x", "/x", "..", ".x", "x" * 1000, "Netz für Bilder"])
def test_the_run_of_a_model_of_any_name_is_in_a_folder_of_the_sweep(tmp_path: Path, model: str) -> None:
    trial = Trial(msgspec.structs.replace(PROFILE, model=model), 2, None, 1.0, True, [ArmSpec("ddp")], 1, 1, 0, 60.0)
    (tmp_path / trial.key).mkdir()
    assert (tmp_path / trial.key).parent == tmp_path
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*-[0-9a-f]{12}", trial.key)
    Cell(model, 2, 0, None, 1.0, "ddp", (1,), 1, 1, 1, folder=trial.key)


def test_a_run_keeps_its_folder_where_the_models_name_can_be_one() -> None:
    trial = Trial(PROFILE, 2, None, 1.0, True, [ArmSpec("ddp")], 1, 1, 0, 60.0)
    assert trial.key.startswith("alexnet-")


@pytest.mark.parametrize("folder", ["../x", "/x", "x/y", "..", ".", "x\0"])
def test_a_sweep_whose_run_is_not_in_its_folder_is_refused(tmp_path: Path, folder: str) -> None:
    cell = Cell("alexnet", 2, 0, None, 1.0, "ddp", (1,), 1, 1, 1, folder="F")
    data = Sweep("gradlane compare", "here", (cell,)).to_json()
    (tmp_path / "sweep.json").write_bytes(data.replace(b'"folder":"F"', b'"folder":' + msgspec.json.encode(folder)))
    said = invoke("report", tmp_path, code=2)
    assert said.startswith(f"gradlane: {tmp_path / 'sweep.json'}: folder: got ")
    assert "expected the name of a folder beside the file" in said


def test_a_job_that_left_no_plan_or_another_is_refused_with_the_file(tmp_path: Path) -> None:
    files.write(tmp_path / "timeline-rank0.json", msgspec.structs.replace(simulated("blocks")[1], rank=0))
    (tmp_path / "timeline-rankx.json").touch()
    assert f"{tmp_path / 'plan-rank0.json'}: got no file that can be read" in invoke("report", tmp_path, code=2)
    files.write(tmp_path / "plan-rank0.json", simulated("wfbp")[0])
    assert "expected the one that a timeline beside it is of" in invoke("report", tmp_path, code=2)


def test_of_a_simulation_there_are_no_steps_but_all_else() -> None:
    plan, timeline = simulated("blocks")
    arm = simulated_arm("blocks", plan, timeline, PROFILE.in_order_of(plan.tensors), 2 * 10**6, 10**6, 3 * 10**6, [2])
    assert (arm.turns_ms, arm.median_ms, arm.speedup) == ([], None, (1.5, 1.5, 1.5))
    assert arm.timeline is not None
    assert [rank.rank for rank in arm.timeline.ranks] == [-1]
    assert arm.parts is not None


def test_the_answer_of_a_job_says_what_calm_steps_wait_whatever_another_step_did(tmp_path: Path) -> None:
    plan, timeline = simulated("wfbp")
    last = timeline.of("step")[-1]
    late = msgspec.structs.replace(last, end_ns=last.end_ns + 20 * (last.end_ns - last.start_ns))
    spans = tuple(late if span is last else span for span in timeline.spans)
    answers = []
    for name, each in (("calm", timeline), ("disturbed", msgspec.structs.replace(timeline, spans=spans))):
        folder = tmp_path / name
        folder.mkdir()
        files.write(folder / "timeline-rank0.json", msgspec.structs.replace(each, rank=0))
        files.write(folder / "plan-rank0.json", plan)
        files.write(folder / "profile.json", PROFILE)
        trial = of_launch(folder)
        (arm,) = trial.arms
        assert arm.parts is not None
        assert f"usual steps spend {arm.parts.waits:.0%} of their time waiting" in trial.answer
        calm = [(span.end_ns - span.start_ns) / 1e6 for span in each.of("step") if span is not late]
        assert arm.parts.wait / arm.parts.waits == pytest.approx(sum(calm) / len(calm))
        answers.append(arm.parts.waits)
    assert answers[1] == pytest.approx(answers[0], rel=0.2)


def of_names(folder: Path, names: str) -> set[Path]:
    """Empty files of these names."""
    paths = {folder / name for name in names.split()}
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    return paths


def test_the_files_of_a_job_are_those_that_ranks_write_and_no_others(tmp_path: Path) -> None:
    written = of_names(
        tmp_path,
        "timeline-rank0.json plan-rank12.json profile.json network.json session-2/timeline-rank0.json session-3/profile.json",
    )
    of_names(
        tmp_path,
        "timeline-rankx.json timeline-rank0.json.bak plan-blocks-rank0.json my-profile.json other/profile.json "
        "session-x/profile.json session-2/weights.pt report.html",
    )
    assert set(files_of_job(tmp_path)) == written
    assert len(files_of_job(tmp_path)) == len(written)


def test_the_files_of_a_comparison_are_those_that_it_writes_and_no_others(tmp_path: Path) -> None:
    written = of_names(
        tmp_path,
        "comparison.json sweep.json config.json links.jsonl timeline.json report.html rank-0.json rank-2.json "
        "profile-rank2.json timeline-p3,slice_bytes=1-rank2.json plan-auto@any-rank0.json network-auto@any-rank1.json "
        "network-all-reduce-rank1.json network-server-2-rank0.json search-auto@any.json timeline-torch-ddp-rank0.json",
    )
    of_names(
        tmp_path,
        "plan-mine-rank0.json rank-x.json search-mine.json links.json network-mine-rank0.json "
        "alexnet-0123456789ab/rank-0.json p.json",
    )
    arms = [ArmSpec("p3", label="p3:slice_bytes=1"), ArmSpec("auto", "any"), ArmSpec("mercury", "server", servers=2)]
    assert set(files_of_run(tmp_path, arms)) == written


def test_a_file_of_any_policy_has_a_name_of_its_own_that_every_file_system_takes() -> None:
    names = ["p3", "p3:slice_bytes=1MiB", "p3,slice_bytes=1MiB", "p3%3Aslice_bytes=1MiB", "auto@any", "../x", "a\\b", 'a*?"<>|']
    found = [file_of("plan", name, 0) for name in names]
    assert found[:2] == ["plan-p3-rank0.json", "plan-p3,slice_bytes=1MiB-rank0.json"]
    assert len({*found}) == len(names)
    assert not {*'<>:"/\\|?*'} & {*"".join(found)}


def test_a_job_without_a_whole_step_says_so(tmp_path: Path) -> None:
    plan, timeline = simulated("wfbp")
    spans = tuple(span for span in timeline.spans if span.kind != "step")
    files.write(tmp_path / "timeline-rank0.json", msgspec.structs.replace(timeline, spans=spans, rank=0))
    files.write(tmp_path / "plan-rank0.json", plan)
    files.write(tmp_path / "profile.json", PROFILE)
    files.write(tmp_path / "network.json", NETWORK)
    trial = of_launch(tmp_path)
    assert trial.answer == "No whole step was recorded under wfbp, the last plan; let the script train longer."
    assert (trial.title, trial.number) == ("alexnet, no whole step under the last plan, of ranks 0", "-")


@pytest.mark.parametrize(("factor", "doubts"), [(0.5, "bound"), (1.0, ""), (3.0, "simulated")])
def test_steps_that_are_shorter_than_the_bound_are_a_reason_to_doubt_it(tmp_path: Path, factor: float, doubts: str) -> None:
    plan, timeline = simulated("wfbp")
    profile = PROFILE.stretched(1 / factor)
    files.write(tmp_path / "timeline-rank0.json", msgspec.structs.replace(timeline, rank=0))
    files.write(tmp_path / "plan-rank0.json", plan)
    files.write(tmp_path / "profile.json", profile)
    files.write(tmp_path / "network.json", NETWORK)
    begins = {"bound": "doubt the bound: a step takes ", "simulated": "take what is simulated as rough: ", "": None}[doubts]
    remarks = of_launch(tmp_path).remarks
    assert [remark[: len(begins or "")] for remark in remarks] == ([begins] if begins else [])


def test_a_profile_of_another_model_is_named(tmp_path: Path) -> None:
    plan, timeline = simulated("wfbp")
    files.write(tmp_path / "timeline-rank0.json", msgspec.structs.replace(timeline, rank=0))
    files.write(tmp_path / "plan-rank0.json", plan)
    files.write(tmp_path / "profile.json", zoo.profile("vgg16"))
    files.write(tmp_path / "network.json", NETWORK)
    said = invoke("report", tmp_path, code=2)
    name = next(spec.name for spec in plan.tensors if spec.name not in {each.name for each in zoo.profile("vgg16").specs})
    assert said.startswith(f"gradlane: {tmp_path / 'profile.json'}: got a profile of vgg16 without the tensor {name!r}, ")


def test_percentiles_lie_between_measured_values_and_are_the_same_from_both_ends() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [quantile(values, part) for part in (0, 0.1, 0.5, 0.9, 1)] == pytest.approx([1, 1.4, 3, 4.6, 5])
    assert quantile([7.0], 0.9) == 7
    assert quantile(values, 0.9) - 3 == pytest.approx(3 - quantile(values, 0.1))
