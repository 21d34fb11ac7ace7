"""The commands that ask the simulator: simulate, whatif, and plan by name."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from gradlane import zoo
from gradlane.core import files
from gradlane.core.cluster import Cluster, Host, Link, Server, Worker
from gradlane.core.network import CostSegment, Network, Sharing
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.units import format_ns
from tests.commands import facts_of, invoke


def test_simulate_sweeps_models_rates_and_workers():
    rows = json.loads(
        invoke("simulate", "vgg16", "resnet50", "--rate", "1gbit,10gbit", "--workers", "2..8", "--policy", "ddp", "--json")
    )["rows"]
    assert [(row["model"], row["bits_per_second"], row["workers"]) for row in rows] == [
        (model, rate, workers) for model in ("vgg16", "resnet50") for rate in (10**9, 10**10) for workers in (2, 4, 8)
    ]
    assert all(row["iteration_ns"] >= row["bound_ns"] >= row["oracle_ns"] for row in rows)


def test_simulate_says_what_all_rows_share_once_and_marks_what_varies():
    text = invoke("simulate", "resnet18", "--workers", "2,4", "--policy", "wfbp", "--policy", "ddp")
    assert "resnet18, 10 Gbit/s rate" in text
    assert "above bound" in text
    assert text.count("wfbp") == 2


@pytest.mark.slow
def test_simulate_draws_and_writes_a_timeline(tmp_path):
    plot, timeline = tmp_path / "plot.svg", tmp_path / "trace.json"
    invoke("simulate", "alexnet", "--rate", "1gbit,10gbit", "--servers", "same", "--policy", "p3", "--plot", plot)
    assert "<svg" in plot.read_text()
    invoke("simulate", "alexnet", "--policy", "wfbp", "--timeline", timeline)
    assert json.loads(timeline.read_text())["traceEvents"]
    assert "expected one policy on one model" in invoke("simulate", "alexnet", "--timeline", timeline, code=2)
    assert "expected a name that ends" in invoke(
        "simulate", "alexnet", "--policy", "ddp", "--plot", tmp_path / "plot.xyz", code=2
    )


def test_whatif_bandwidth_finds_less_for_mercury_than_for_wfbp():
    rows = json.loads(
        invoke(
            "whatif",
            "bandwidth",
            "vgg16",
            "--servers",
            "same",
            "--workers",
            "2",
            "--policy",
            "wfbp",
            "--policy",
            "mercury",
            "--json",
        )
    )["rows"]
    needed = {(row["policy"], row["target"]): row["bits_per_second"] for row in rows}
    assert needed["mercury", 0.99] < 0.6 * needed["wfbp", 0.99]
    assert needed["mercury", 0.9] < needed["mercury", 0.99]
    text = invoke("whatif", "bandwidth", "vgg16", "--policy", "ddp", "--target", "0.9")
    assert "90% of linear" in text
    assert "expected none" in invoke("whatif", "bandwidth", "vgg16", "--rate", "1gbit", code=2)


def test_a_target_is_said_with_all_of_its_digits():
    text = invoke("whatif", "bandwidth", "alexnet", "--workers", "2", "--policy", "ddp", "--target", "98.76%")
    assert text.startswith("98.76% of linear takes links of ")
    assert " 98.76% " in text


def test_whatif_bandwidth_says_where_it_tried_no_lower_rate():
    words = ("whatif", "bandwidth", "alexnet", "--workers", "1x8", "--policy", "wfbp", "--policy", "ddp", "--target", "90%")
    text = invoke(*words)
    assert text.startswith("90% of linear takes links of at most 8.62 Mbit/s, the lowest rate tried, with ddp.\n")
    assert [row["is_lowest_tried"] for row in json.loads(invoke(*words, "--json"))["rows"]] == [True, True]
    (row,) = json.loads(invoke("whatif", "bandwidth", "alexnet", "--policy", "wfbp", "--target", "0.5", "--json"))["rows"]
    assert row["is_lowest_tried"] is False


def test_whatif_bandwidth_counts_clipping_by_the_norm():
    def needed(*more):
        words = ("whatif", "bandwidth", "resnet18", "--workers", "2", "--target", "0.9", "--json")
        return {row["policy"]: row["bits_per_second"] for row in json.loads(invoke(*words, *more))["rows"]}

    free, clipped = needed(), needed("--clips")
    assert set(clipped) == {*free, "owners"}
    assert clipped["blocks"] > 1.1 * free["blocks"]
    assert clipped["ddp"] == free["ddp"]


def test_numbers_of_workers_are_in_order_however_they_are_typed():
    typed, sorted_ = (
        invoke("whatif", "workers", "resnet50", "--workers", counts, "--policy", "ddp", "--policy", "mg-wfbp")
        for counts in ("64,1,8,8", "1,8,64")
    )
    assert typed == sorted_
    typed, sorted_ = (
        invoke("whatif", "rates", "resnet50", "--rate", counts, "--policy", "ddp")
        for counts in ("10gbit,1gbit", "1gbit,10gbit")
    )
    assert typed == sorted_


def test_the_title_names_every_all_reduce_that_is_simulated():
    text = invoke("whatif", "workers", "alexnet", "--workers", "8,1x8", "--policy", "ddp")
    assert "alexnet, auto or ring all-reduce: % of linear scaling" in text


def test_help_says_of_each_question_a_whole_sentence():
    listed = invoke("whatif", "--help", columns=80).partition("Commands:\n")[2].splitlines()
    assert len(listed) == 5
    assert all(line.endswith(".") and not line.endswith(("...", "Fig.", "Figs.")) for line in listed)


def test_whatif_rates_and_workers_end_with_what_no_schedule_exceeds():
    assert "no more than" in invoke("whatif", "rates", "vgg16", "--rate", "1gbit,10gbit", "--policy", "wfbp")
    rows = json.loads(invoke("whatif", "workers", "googlenet", "--workers", "4,64", "--policy", "mg-wfbp", "--json"))["rows"]
    assert [row["workers"] for row in rows] == [4, 64]


def test_whatif_knobs_is_a_table_of_partition_by_credit():
    text = invoke("whatif", "knobs", "vgg16", "--servers", "same", "--partition", "1MiB,4MiB", "--credit", "4MiB")
    assert "1.0 MiB" in text
    assert "4.0 MiB" in text
    assert "expected one at least as large" in invoke(
        "whatif", "knobs", "vgg16", "--partition", "4MiB", "--credit", "1MiB", code=2
    )


@pytest.mark.slow
def test_whatif_knobs_and_bandwidth_can_be_drawn(tmp_path):
    for question in (("knobs", "--partition", "1MiB,4MiB"), ("bandwidth", "--policy", "ddp", "--target", "0.999")):
        plot = tmp_path / f"{question[0]}.svg"
        text = invoke("whatif", question[0], "alexnet", *question[1:], "--plot", plot)
        assert "<svg" in plot.read_text()
    assert "99.9% of linear" in text


@pytest.mark.parametrize("question", ["workers", "rates", "bandwidth", "knobs"])
def test_a_second_value_of_what_is_held_fixed_is_refused_not_dropped(question):
    option = "--workers" if question == "rates" else "--rate"
    values = "2,4" if question == "rates" else "1gbit,10gbit"
    assert f"{option}: got" in invoke("whatif", question, "alexnet", option, values, code=2)


def test_simulate_writes_what_json_prints_beside_the_table(tmp_path):
    out = tmp_path / "rows.json"
    assert "above bound" in invoke("simulate", "alexnet", "--policy", "ddp", "--out", out)
    assert out.read_text() == invoke("simulate", "alexnet", "--policy", "ddp", "--json")


@pytest.mark.parametrize(
    ("command", "option"), [("simulate", "--plot"), ("simulate", "--timeline"), ("simulate", "--out"), ("plan", "--out")]
)
def test_a_file_that_could_not_be_written_is_refused_before_the_work(tmp_path, command, option):
    assert "whose folder does not exist" in invoke(command, "alexnet", option, tmp_path / "none" / "file.svg", code=2)


def test_plan_says_where_the_next_best_is_as_good():
    text = invoke("plan", "resnet50", "--workers", "4")
    assert "recommended: wfbp" in text
    assert "the same as mg-wfbp" in text


def test_plan_says_where_nothing_is_to_be_gained():
    text = invoke("plan", "alexnet", "--rate", "50gbit")
    assert "nothing to gain: no policy saves more than a percent of the time of ddp, which takes 649.09 ms an iteration" in text
    assert "recommended" not in text


@pytest.mark.parametrize("more", [["--workers", "1024", "--rate", "10gbit"], ["--startup", "100s"]])
def test_plan_recommends_what_saves_much_of_an_iteration_that_is_far_from_linear(more):
    report = json.loads(invoke("plan", "resnet50", "--device", "a100", *more, "--json"))
    best, ddp = report["policies"][0], next(row for row in report["policies"] if row["policy"] == "ddp")
    assert 1.1 * best["iteration_ns"] < ddp["iteration_ns"]
    assert f"recommended: {best['policy']}" in invoke("plan", "resnet50", "--device", "a100", *more)


def test_plan_says_what_startups_cost_by_the_size_of_each_message(tmp_path):
    network = Network(4, (CostSegment(10_000, 10**9, 2**20), CostSegment(4_000_000, 10**9)))
    files.write(tmp_path / "network.json", network)
    text = invoke("plan", "resnet50", tmp_path / "network.json", "--out", tmp_path / "plan.json")
    plan = files.read(tmp_path / "plan.json", Plan)
    startups_ns = [10_000 if message.size_bytes <= 2**20 else 4_000_000 for message in plan.messages]
    assert len(set(startups_ns)) == 2
    assert f"why: {plan.policy} pays {format_ns(sum(startups_ns))} of startup in {len(startups_ns)} messages" in text


def test_plan_with_jitter_says_of_computation_alone_what_its_json_says():
    words = ("plan", "resnet18", "--jitter", "5%", "--policy", "ddp")
    alone_ns = json.loads(invoke(*words, "--json"))["oracle_ns"]
    assert f"computation alone takes {format_ns(alone_ns)}\n" in invoke(*words)


def test_links_of_several_rates_are_shown_as_a_range(tmp_path):
    slow, fast = Link(12_500_000), Link(125_000_000)
    hosts = (Host(fast, fast), Host(slow, fast), Host(fast, fast))
    files.write(tmp_path / "cluster.json", Cluster(hosts, (Worker(0), Worker(1)), (Server(2),)))
    text = invoke("plan", "resnet18", tmp_path / "cluster.json", "--policy", "ddp")
    assert "links of 100 Mbit/s to 1 Gbit/s\n" in text


@pytest.mark.slow
def test_plan_takes_a_name_and_a_described_network_and_writes_a_plan_for_servers(tmp_path):
    out = tmp_path / "plan.json"
    text = invoke("plan", "vgg16", "--servers", "same", "--workers", "4", "--policy", "mercury", "--out", out)
    assert "4 workers and 4 servers on 8 hosts" in text
    assert files.read(out, Plan).wire == "packet-priority"
    text = invoke("plan", "vgg16", "--rate", "10gbit")
    assert "why: " in text
    assert "above bound" in text


def test_plan_takes_a_clusters_file(tmp_path):
    path = tmp_path / "cluster.json"
    files.write(path, Cluster.homogeneous(2, 1, 10**9))
    assert "2 workers and 1 server on 3 hosts" in invoke("plan", "resnet18", path, "--policy", "wfbp")
    assert "expected one or the other" in invoke("plan", "resnet18", path, "--workers", "2", code=2)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["simulate", "vgg17"], "PROFILE: got 'vgg17' (did you mean vgg19?)"),
        (["simulate", "nowhere.json"], "PROFILE: got 'nowhere.json', which is not a file"),
        (["simulate", "vgg16", "--workers", "8..2"], "--workers: got '8..2', expected 1 to 1000000, the smaller first"),
        (["simulate", "vgg16", "--workers", "0"], "--workers: got '0'"),
        (["simulate", "vgg16", "--rate", "fast"], "rate: got 'fast'"),
        (["simulate", "vgg16", "--startup", "1"], "--startup: got '1', expected a number and a unit such as 50us"),
        (["simulate", "vgg16", "--servers", "-1"], "--servers: got '-1'"),
        (["simulate", "vgg16", "--colocated"], "--colocated: got it without --servers"),
        (["whatif", "workers", "vgg16", "--policy", "fast"], "policy: got 'fast'"),
        (["plan", "vgg16", "--workers", "2,4"], "expected one of each"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(arguments, fault):
    assert fault in invoke(*arguments, code=2)


def test_a_profile_cut_short_and_one_with_a_negative_time_are_refused_with_the_place(tmp_path):
    path = tmp_path / "profile.json"
    data = files.dumps(zoo.profile("resnet18"))
    path.write_bytes(data[: len(data) // 2])
    assert "(at $)" in invoke("simulate", path, code=2)
    path.write_bytes(data.replace(b'"forward_ns":', b'"forward_ns":-', 1))
    assert "$.body.layers[0]" in invoke("plan", path, code=2)
    files.write(path, zoo.profile("resnet18"))
    assert files.read(path, Profile).model == "resnet18"
    assert "got it with the file" in invoke("plan", path, "--batch", "3", code=2)


def test_workers_are_hosts_times_devices_wherever_they_are_given():
    rows = json.loads(invoke("simulate", "alexnet", "--workers", "4,4x1,2x2..8x2", "--policy", "ddp", "--json"))["rows"]
    assert [(row["workers"], row["hosts"], row["devices"]) for row in rows] == [
        (4, 4, 1), (4, 2, 2), (8, 4, 2), (16, 8, 2),  # one device a host is one worker, and asked for once
    ]  # fmt: skip
    assert all(row["iteration_ns"] >= row["bound_ns"] >= row["oracle_ns"] for row in rows)
    assert "all-reduce of 16 workers: a message costs" in invoke("plan", "alexnet", "--workers", "2x8", "--policy", "ddp")
    text = invoke("whatif", "workers", "alexnet", "--workers", "2x4,4x4", "--policy", "ddp")
    assert "2x4" in text
    assert "4x4" in text


@pytest.mark.parametrize("servers", [(), ("--servers", "same", "--colocated")])
def test_what_a_host_sums_first_passes_its_card_once(servers):
    def iteration_ns(*options):
        (row,) = json.loads(
            invoke("simulate", "alexnet", "--workers", "4x8", "--policy", "wfbp", *servers, *options, "--json")
        )["rows"]
        return row["iteration_ns"]

    flat = iteration_ns("--flat", *(() if servers else ("--bus", "pcie3")))
    assert iteration_ns("--bus", "nvlink4") < iteration_ns("--bus", "pcie3") < flat
    assert (
        iteration_ns("--bus", "8gbit")
        > iteration_ns("--bus", "80gbit")
        > iteration_ns("--bus", "80gbit", "--bus-startup", "0us")
    )
    if not servers:
        assert iteration_ns("--flat", "--crossings", "8") > 4 * iteration_ns("--flat")


def test_one_worker_computes_and_sends_nothing(tmp_path):
    path = tmp_path / "one.json"
    files.write(path, Network.line(1, 50_000, 10**9))
    for words in (("resnet50", str(path)), ("resnet50", "--workers", "1")):
        found = json.loads(invoke("plan", *words, "--json"))
        assert found["bound_ns"] == found["oracle_ns"]
        assert {(row["iteration_ns"], row["hidden"]) for row in found["policies"]} == {(found["oracle_ns"], None)}
        assert "nothing to schedule: one worker sends nothing" in invoke("plan", *words)
        invoke("plan", *words, "--report", tmp_path / "page.html")
        (trial,) = facts_of(tmp_path / "page.html")["trials"]
        assert all(arm.get("hidden") is arm.get("parts") is arm.get("timeline") is None for arm in trial["arms"])


def test_steps_that_take_no_time_are_simulated(tmp_path):
    profile = zoo.profile("alexnet")
    tensors = tuple(msgspec.structs.replace(tensor, ready_ns=0) for tensor in profile.tensors)
    layers = tuple(msgspec.structs.replace(layer, forward_ns=0, update_ns=0) for layer in profile.layers)
    path = tmp_path / "no-time.json"
    files.write(path, msgspec.structs.replace(profile, tensors=tensors, layers=layers, backward_ns=0, uncovered_ns=0))
    words = (path, "--workers", "1", "--policy", "ddp")
    said = invoke("simulate", *words)
    assert said.startswith("alexnet, 10 Gbit/s rate, 1 worker\n")
    assert "ddp    │      0 ns │     - │  100.0% │" in said
    for question in ("workers", "rates"):
        assert " ddp reaches 100% of linear, no schedule more than 100%." in invoke("whatif", question, *words)


def test_two_profiles_of_one_model_are_told_apart_by_what_was_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profile = zoo.profile("alexnet")
    files.write("slow.json", profile)
    files.write("fast.json", msgspec.structs.replace(profile, backward_ns=profile.backward_ns + 10**6))
    words = ("slow.json", "fast.json", "--workers", "2", "--policy", "ddp")
    rows = json.loads(invoke("simulate", *words, "--json"))["rows"]
    assert [row["model"] for row in rows] == ["alexnet (slow.json)", "alexnet (fast.json)"]
    said = invoke("simulate", *words)
    assert "alexnet (slow.json) " in said
    assert "alexnet (fast.json) " in said
    (alone,) = json.loads(invoke("simulate", "slow.json", "slow.json", *words[2:], "--json"))["rows"]
    assert alone == {**rows[0], "model": "alexnet"}


def test_over_servers_ddp_is_named_for_what_it_is_beside_what_torchs_takes(tmp_path):
    words = ("vgg16", "--workers", "8", "--policy", "mercury")
    torchs = json.loads(invoke("plan", *words[:3], "--policy", "ddp", "--json"))["policies"][0]["iteration_ns"]
    planned = json.loads(invoke("plan", *words, "--servers", "1", "--json"))
    assert planned["ddp_by_all_reduce_ns"] == torchs < min(row["iteration_ns"] for row in planned["policies"])
    said = "ddp here sends DDP's buckets to the servers, first in, first out. torch's own DDP all-reduces them"
    line = f"{said}: {format_ns(torchs)} a step between these hosts."
    assert line in invoke("plan", *words, "--servers", "1", "--report", tmp_path / "page.html")
    (trial,) = facts_of(tmp_path / "page.html")["trials"]
    assert trial["remarks"] == [line]
    assert f"{said}." in invoke("simulate", *words, "--policy", "ddp", "--servers", "1")
    assert said not in invoke("simulate", *words, "--servers", "1")
    assert f"{said}." in invoke("whatif", "rates", *words, "--policy", "ddp", "--servers", "1", "--rate", "1gbit,10gbit")
    assert "ddp here" not in invoke("plan", *words[:3], "--policy", "blocks")
    assert json.loads(invoke("plan", *words[:3], "--json"))["ddp_by_all_reduce_ns"] is None
    too_long = ("alexnet", "--workers", "100000", "--servers", "same", "--startup", "100s", "--policy", "mercury", "--json")
    assert json.loads(invoke("plan", *too_long))["ddp_by_all_reduce_ns"] is None


def test_where_no_policy_is_faster_than_ddp_ddp_is_chosen(tmp_path):
    profile = zoo.profile("alexnet")
    one = msgspec.structs.replace(profile.tensors[0], layer=0)
    path = tmp_path / "one.json"
    files.write(path, msgspec.structs.replace(profile, tensors=(one,), layers=profile.layers[:1]))
    words = (path, "--workers", "4", "--startup", "1ms", "--rate", "100gbit")
    planned = json.loads(invoke("plan", *words, "--json"))
    assert len({row["iteration_ns"] for row in planned["policies"][:2]}) == 1
    assert planned["chosen"] == planned["policies"][0]["policy"] == "ddp"
    assert "and nothing is faster, the same as wfbp" in invoke("plan", *words)
    assert "wfbp: " in (said := invoke("plan", *words, "--policy", "wfbp"))
    assert "an iteration, the same as ddp" in said


def test_policies_that_plan_for_some_hosts_only_are_asked_whatever_hosts_come_first():
    words = ("whatif", "workers", "resnet50", "--algorithm", "ring", "--clips", "--batch", "4")
    mixed, reversed_ = (invoke(*words, "--workers", hosts) for hosts in ("4x2,8", "8,4x2"))
    assert "With 8 workers ddp reaches 62% of linear, owners 67%" in mixed
    assert mixed.splitlines()[0] == reversed_.splitlines()[0]


def test_a_network_that_cuts_a_step_into_millions_of_chunks_is_refused(tmp_path):
    path = tmp_path / "network.json"
    network = Network.line(4, 50_000, 10**9)
    files.write(path, msgspec.structs.replace(network, sharing=Sharing(max_in_flight=4, chunk_bytes=1)))
    text = invoke("plan", "resnet50", str(path), code=2)
    assert "sharing.turn_bytes: got 1, expected a network that sends the " in text
    assert "messages of a step in at most 500000 chunks, not 102228128" in text


def test_each_number_of_whatif_faster_is_of_the_policy_that_it_names():
    words = ("whatif", "faster", "resnet50", "--device", "v100", "--batch", "64", "--rate", "5gbit", "--workers", "16x2",
             "--algorithm", "ring", "--times", "4", "--policy", "dear", "--policy", "mg-wfbp")  # fmt: skip
    rows = json.loads(invoke(*words, "--json"))["rows"]
    best = dict.fromkeys(row["change"] for row in rows)  # in the order of the answer
    for row in sorted(rows, key=lambda row: row["efficiency"]):
        best[row["change"]] = f"{row['efficiency']:.1%} with {row['change']} ({row['policy']})"
    now = best.pop("now").replace("% with now", "% of linear now")
    assert len({text.rpartition(" ")[2] for text in best.values()} | {now.rpartition(" ")[2]}) == 2
    assert f"The best policy reaches {now}, {', '.join(best[change] for change in best)}" in invoke(*words).replace("\n", " ")


def test_a_line_of_a_chart_is_of_one_kind_of_hosts(monkeypatch):
    drawn = {}
    monkeypatch.setattr("gradlane.report.plots.draw", lambda path, panels, *rest, **options: drawn.update(panels))
    invoke("simulate", "alexnet", "--workers", "2x4,8", "--policy", "ddp", "--plot", "p.svg")
    (lines,) = drawn.values()
    assert {name: [x for x, _ in points] for name, points in lines.items()} == {"ddp, 1 a host": [8], "ddp, 4 a host": [8]}


def test_whatif_faster_tells_the_card_s_share_from_the_bus_s():
    rows = json.loads(
        invoke(
            "whatif",
            "faster",
            "alexnet",
            "--workers",
            "4x8",
            "--bus",
            "16gbit",
            "--rate",
            "10gbit",
            "--policy",
            "wfbp",
            "--json",
        )
    )["rows"]
    took = {row["change"]: row["iteration_ns"] for row in rows}
    assert list(took) == ["now", "card x 2", "bus x 2", "both"]
    assert took["both"] < min(took["card x 2"], took["bus x 2"]) <= max(took["card x 2"], took["bus x 2"]) <= took["now"]
    assert "card x 4" in invoke("whatif", "faster", "alexnet", "--times", "4", "--policy", "ddp")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("simulate", "--workers", "2x8..4x4"), "as many on all hosts: 2x8..64x8"),
        (("simulate", "--workers", "2x"), "expected a number, hosts x devices as in 16x8"),
        (("simulate", "--workers", "2x0"), "expected 1 to 1024 devices"),
        (("simulate", "--workers", "8", "--bus", "pcie4"), "--bus: got it with one device a host"),
        (("simulate", "--workers", "2x8", "--bus", "pcie5"), "bus: got 'pcie5' \\(did you mean pcie4"),
        (("simulate", "--workers", "2x8", "--crossings", "2"), "--crossings: got it without a ring"),
        (("simulate", "--workers", "2x8", "--flat", "--crossings", "9"), "crossings: got 9, expected an integer from 1 to 8"),
        (("simulate", "--workers", "2x8", "--flat", "--algorithm", "halving-doubling"), "--flat: got it with --algorithm"),
        (("whatif", "faster", "--workers", "16"), "expected hosts of several devices, as in 16x8"),
        (("whatif", "bandwidth", "--workers", "16", "--flat"), "--flat: got it with one device a host"),
    ],
)  # fmt: skip
def test_what_hosts_cannot_have_is_refused(words, fault):
    assert re.search(fault, invoke(*words, "alexnet", code=2))


# -- policies that cannot plan -----------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path):
    """A model of 40 GB, of which `p3` in its default slices would make more messages than a plan may have."""
    profile = zoo.profile("llama-1b")
    tensors = tuple(
        msgspec.structs.replace(tensor, spec=msgspec.structs.replace(tensor.spec, size_bytes=8 * tensor.spec.size_bytes))
        for tensor in profile.tensors
    )
    path = tmp_path / "large.json"
    files.write(path, msgspec.structs.replace(profile, tensors=tensors))
    return path


def test_a_policy_that_cannot_plan_is_apart_from_the_rows_and_says_why(large, tmp_path):
    network = ("--workers", "2", "--servers", "same", "--rate", "100gbit")
    asked = ("--policy", "p3", "--policy", "ddp", "--policy", "wfbp")
    planned = json.loads(invoke("simulate", large, *network, *asked[2:], "--json"))
    found = json.loads(invoke("simulate", large, *network, *asked, "--json"))
    assert planned["refused"] == []
    assert found["rows"] == planned["rows"]
    (refused,) = found["refused"]
    assert refused.items() >= {"policy": "p3", "model": "llama-1b", "workers": 2, "bits_per_second": 10**11}.items()
    assert "messages, expected at most" in refused["reason"]
    page = tmp_path / "page.html"
    text = invoke("simulate", large, *network, *asked, "--report", page)
    assert "cannot plan" in text
    assert refused["reason"] in text
    line = f"p3 cannot plan: {refused['reason']}"
    assert line in facts_of(page)["trials"][0]["remarks"]
    invoke("plan", large, *network, "--report", page)
    assert line in facts_of(page)["trials"][0]["remarks"]
    invoke("whatif", "rates", large, *network, *asked, "--report", page)
    (trial,) = facts_of(page)["trials"]
    assert line in trial["remarks"]
    (table,) = trial["tables"]
    assert table["headings"][0] == "rate"
    assert [row[1] for row in table["rows"]] == ["ddp", "wfbp", "no more than"]
    found = json.loads(invoke("whatif", "rates", large, *network, *asked, "--json"))
    assert {row["policy"] for row in found["rows"]} == {"ddp", "wfbp"}
    assert found["refused"] == [refused]
    found = json.loads(invoke("whatif", "bandwidth", large, *network[:4], *asked[:4], "--json"))
    assert {row["policy"] for row in found["rows"]} == {"ddp"}
    assert found["refused"] == [{**refused, "bits_per_second": 4 * 10**11}]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("whatif", "rates", "vgg16", "--workers", "8", "--rate", "8bit,10gbit"), "for 8 bit/s"),
        (("simulate", "vgg16", "--workers", "8", "--rate", "8bit,10gbit"), "for vgg16, 8 bit/s, 8 workers"),
    ],
)
def test_a_policy_that_cannot_plan_some_cases_is_said_with_these(words, named):
    said = invoke(*words, "--policy", "ddp", "--policy", "wfbp")
    for policy in ("ddp", "wfbp"):
        assert f"{policy} cannot plan {named}: step: got '553430176.00 s', expected less than" in said


def test_a_policy_that_can_plan_no_case_is_said_without_them(large):
    network = ("--workers", "2", "--servers", "same", "--rate", "10gbit,100gbit")
    said = invoke("whatif", "rates", large, *network, "--policy", "p3", "--policy", "ddp")
    assert said.count("p3 cannot plan: policy p3: slice_bytes: got 160000") == 1


def test_a_policy_that_cannot_plan_while_a_rate_is_searched_is_said_with_the_rate(large):
    words = ("whatif", "bandwidth", large, "--workers", "2", "--servers", "same", "--policy", "p3")
    why = "policy p3: slice_bytes: got 160000"
    assert f"p3 cannot plan for 400 Gbit/s: {why}" in invoke(*words, "--policy", "ddp")
    assert f"gradlane: at 400 Gbit/s: {why}" in invoke(*words, code=2)


@pytest.mark.slow
def test_plan_ranks_the_policies_that_can_plan(large):
    answer = json.loads(invoke("plan", large, "--workers", "2", "--rate", "100gbit", "--json"))
    assert [row["policy"] for row in answer["refused"]] == ["p3"]
    assert "p3" not in {row["policy"] for row in answer["policies"]}
    assert answer["chosen"] in {row["policy"] for row in answer["policies"]}


def test_where_no_policy_can_plan_the_reason_is_the_error(large):
    for command in (("simulate",), ("plan",), ("whatif", "bandwidth")):
        words = (*command, large, "--workers", "2", "--servers", "same", "--policy", "p3")
        assert "messages, expected at most" in invoke(*words, code=2)
