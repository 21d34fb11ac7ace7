from __future__ import annotations

import ast
import importlib
from pathlib import Path

import numpy as np
import pytest

from experiments import (
    brief,
    bytescheduler,
    geryon,
    mercury_baselines,
    mercury_model,
    mercury_packets,
    mg_wfbp,
    mg_wfbp_testbed,
    not_compared,
    pictures,
    prophet,
    searches,
)
from experiments.assumptions import GBIT, dealt_ns, k80_cluster, servers, speed
from experiments.lab import claims, operating
from experiments.lab import page as lab_page
from experiments.lab import results as lab_results
from experiments.lab.first_come import FirstCome
from experiments.lab.operating import Cell, Point, arm
from experiments.lab.results import Measured
from experiments.mg_wfbp_networks import counted_twice, fitted, over_its_links, script_cluster, startups_on_device
from experiments.mg_wfbp_testbed import half_precision
from experiments.table import Count, Row, count, difference, page, summary, wrong_rows
from gradlane import lab, trace, zoo
from gradlane.core.checks import check_plan
from gradlane.core.cluster import Cluster, Link
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Lane, Message, Plan
from gradlane.core.profile import Profile
from gradlane.core.timeline import Timeline
from gradlane.planning.questions import Case, judge
from gradlane.planning.search import GaussianProcess, Grid, Prior
from gradlane.testing.generators import chain

NO_DATA = Path("nowhere")
DATA = Path(__file__).parents[3] / "shared" / "data"
MB = 10**6


def test_the_k80_cluster_of_16_costs_what_was_fitted():
    network = k80_cluster("ring", 16)
    assert network.startup_ns == pytest.approx(972_000, rel=1e-4)
    assert 1 / network.bytes_per_second == pytest.approx(1.97e-9, rel=1e-4)


def test_every_plan_comes_from_a_policy_as_a_user_has_it():
    """An experiment chooses a cluster, a profile and knobs; it changes no plan, and plans with no other network."""
    of_plans = {*Plan.__struct_fields__, *Message.__struct_fields__, *Lane.__struct_fields__, *Place.__struct_fields__}
    of_plans -= {*Profile.__struct_fields__, *Cluster.__struct_fields__}
    for path in sorted(Path(importlib.import_module("experiments").__file__).parent.rglob("*.py")):
        for node in ast.walk(without_policies(ast.parse(path.read_text()))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                where = f"{path.name}, line {node.lineno}: {ast.unparse(node)}"
                assert called not in ("Plan", "Message", "Lane"), where
                if called.endswith("replace"):
                    assert not of_plans.intersection(each.arg for each in node.keywords), where


def without_policies(module: ast.Module) -> ast.Module:
    """The module without its policies, which a user may write too."""
    body = [node for node in module.body if not (isinstance(node, ast.ClassDef) and {"name", "plan"} <= members(node))]
    return ast.Module(body, [])


def members(node: ast.ClassDef) -> set[str]:
    named = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}
    return named | {each.name for each in node.body if isinstance(each, ast.FunctionDef)}


def test_differences_are_relative_or_in_points():
    assert difference(Row("f", "w", 2.0, 3.0, "x")) == "+50%"
    assert difference(Row("f", "w", 40.0, 44.4, "%")) == "+4.4 points"
    assert (difference(Row("f", "w", "yes", "yes")), difference(Row("f", "w", "yes", "no"))) == ("same", "other")
    assert difference(Row("f", "w", None, 3.0)) == ""
    in_range = [difference(Row("f", "w", "28 to 51 %", ours)) for ours in ("38 %", "28 51.0 %", "52 %", "30 60 %", "-74 %")]
    assert in_range == ["same", "same", "other", "other", "other"]
    together = Row("f", "w", (2.0, 1200.0), (3.0, 1200.0), "x")
    assert difference(together) == "+50% +0%"
    assert "| 2 1200 x | 3 1200 x |" in page([("T", "remarks", [together])])
    assert "| f | w | plot | 3 x |  |" in page([("T", "remarks", [Row("f", "w", None, 3.0, "x")])])


def test_the_head_counts_what_agrees_and_what_is_wrong_in_sign_or_order():
    rows = [
        Row("f", "points", (80.0, 90.0), (84.0, 76.0), "%"),  # within 5, within 15; the order is turned round
        Row("f", "gain", 1.1, 0.9, "x"),  # a loss
        Row("f", "words", "yes", "yes"),
        Row("f", "in a plot", None, 3.0),
        Row("f", "tried: once more", 1.0, 1.0, counts=False),
    ]
    assert count(rows) == Count(compared=4, within_5=2, within_15=3, wrong=2)
    assert "| all | 9 | 5 | 4 | 2 | 3 | 2 |" in summary([("P", 9, 5, rows)])
    assert wrong_rows([("P", rows)]).splitlines()[2:] == [
        "| P | f | points | 80.0 90.0 % | 84.0 76.0 % | 1 |",
        "| P | f | gain | 1.1 x | 0.9 x | 1 |",
    ]


def test_what_the_simulator_reproduces_it_goes_on_reproducing():
    assert bytescheduler._figure_2().ours == pytest.approx(44.4, abs=0.05)
    assert geryon._order_is_worth() == pytest.approx(1.31, abs=0.03)
    assert geryon.collision() == pytest.approx(0.5, abs=0.01)
    rows = {
        (row.figure, row.what): row for row in mg_wfbp._scaling("resnet50", "resnet50", zoo.profile("resnet50"), counts=True)
    }
    for constants in ("the script's a, b", "a, b of Fig. 4(a)"):
        assert rows["Fig. 10", f"resnet50, {constants}: WFBP falls behind SyncEASGD between 16 and 64 workers"].ours == "yes"


def test_the_scripts_cluster_of_16_costs_what_the_script_says():
    (segment,) = script_cluster("ring", 16).segments
    assert segment.startup_ns == 2 * 16 * 45_250
    assert 1e9 / segment.bytes_per_second == pytest.approx(15 / 16 * (2 * 0.9934 + 2.5), rel=1e-4)
    (trees,) = script_cluster("double-binary-trees", 16).segments
    assert trees.startup_ns == 2 * 4 * 45_250
    assert 1e9 / trees.bytes_per_second == pytest.approx(0.9934 + 2.5, rel=1e-4)  # as the paper prints it


def test_no_byte_of_a_ring_is_faster_than_its_links():
    assert 1e9 / over_its_links("10GbE").bytes_per_second == pytest.approx(2 * 15 / 16 * 0.8, rel=1e-6)  # 0.8 ns a byte
    assert over_its_links("56GbIB") == fitted("56GbIB")  # 0.41 ns, where its links allow 0.27


def test_twice_the_time_per_byte_of_ten_gigabit_ethernet_is_what_its_links_allow():
    assert 2 / fitted("10GbE").bytes_per_second == pytest.approx(1 / over_its_links("10GbE").bytes_per_second, rel=0.015)
    assert counted_twice("10GbE") == over_its_links("10GbE")
    assert 1e9 / counted_twice("56GbIB").bytes_per_second == pytest.approx(2 * 0.406, rel=1e-6)


def test_packets_that_cost_time_have_a_best_size_between_the_least_and_the_largest():
    speeds = mercury_packets._speeds("alexnet", 3, 10 * mercury_packets.PACKET_NS)
    best = max(speeds, key=speeds.__getitem__)
    assert min(speeds) < best < max(speeds)
    assert mercury_packets._level(dict.fromkeys(mercury_packets.SIZES, 1.0)) == "8 KB to 4 MB"
    assert (
        mercury_packets._level(dict(zip(mercury_packets.SIZES, (0.9, 0.97, 0.98, 1, 0.99, 0.9), strict=True)))
        == "64 KB to 1 MB"
    )


def test_two_jobs_at_once_are_slower_than_either_alone_with_half_of_a_device():
    together = mercury_baselines._together(mercury_baselines.MERCURY, 1.0)
    for model, rate in zip(mercury_baselines.TOGETHER, together, strict=True):
        alone = mercury_model.on_caltech101(zoo.profile(model, device="gtx-1080ti", batch=16)).stretched(2.0)
        assert rate < 1e9 / alone.compute_ns


def test_a_startup_on_the_device_costs_as_much_and_is_not_hidden():
    network, profile = fitted("56GbIB"), zoo.profile("densenet201")
    changed = startups_on_device(network)
    assert changed.start_ns == network.startup_ns
    assert changed.cost_ns(10**6) + changed.start_ns == network.cost_ns(10**6)
    hidden, added = (mg_wfbp_testbed._seconds(profile, network, each) for each in (network, changed))
    assert added[0] - profile.compute_ns / 1e9 == pytest.approx(604 * 236e-6, rel=0.01)  # WFBP: one for each tensor
    assert 0 <= hidden[1] - added[1] < 237e-6  # SyncEASGD's one message starts when all is computed


def test_the_authors_recording_and_network_give_their_groups():
    recording = DATA / "b-caffe-googlenet-k80" / "tmp4ocomm.log"
    if not recording.is_file():
        pytest.skip(f"no recording at {recording}")
    groups = mg_wfbp._groups(mg_wfbp._rings(trace.read(recording), lambda workers: script_cluster("ring", workers)))
    same = [ours == published for ours, published in zip(groups, mg_wfbp.MERGED["googlenet"], strict=True)]
    assert same.count(True) == 9


def test_a_profile_in_half_precision_and_in_another_time():
    profile = zoo.profile("alexnet")
    other = half_precision(profile.stretched(0.5))
    assert other.size_bytes * 2 == profile.size_bytes
    assert other.compute_ns == pytest.approx(profile.compute_ns / 2, rel=1e-6)
    assert {seen.spec.dtype for seen in other.tensors} == {"float16"}


def test_late_pulls_in_random_order_cost_slices_what_geryon_publishes():
    testbed = geryon._Systems("resnet50", 10)
    assert testbed._mean(100) == pytest.approx(90.0, abs=3)
    assert testbed._percent(testbed._ns(testbed._geryon(100))) > 99  # each sum sent back at once


def test_wfbp_with_pulls_that_share_a_link_is_what_the_simulator_has():
    profile = mercury_model.on_caltech101(zoo.profile("vgg16", device="gtx-1080ti", batch=32))
    rate = 10 * GBIT
    simulated = 1e9 / speed("wfbp", profile, Cluster.homogeneous(1, 1, rate))
    shared, literal = (
        mercury_model.wfbp_ns(profile, rate, pulls_share=share, crosses_barrier=crosses)
        for share, crosses in ((True, False), (False, True))
    )
    assert shared == pytest.approx(simulated, rel=1e-6)
    assert literal < 0.9 * shared
    assert mercury_model.most_pulls_at_once(profile, rate) > 1


def test_caltech101_has_101_classes():
    sizes = {name: mercury_model.on_caltech101(zoo.profile(name)).size_bytes / 4e6 for name in ("vgg16", "vgg19", "resnet50")}
    assert sizes == pytest.approx({"vgg16": 134.7, "vgg19": 140.0, "resnet50": 23.7}, abs=0.05)


def test_the_least_rate_is_the_first_from_above_that_is_not_enough():
    assert mercury_model.least_rate(lambda rate: rate / 10**8, 0.5) == pytest.approx(5 * 10**7, rel=0.011)


def test_mercurys_unlike_devices_are_half_slow_and_half_fast():
    where = mercury_baselines.unlike(Cluster.homogeneous(4, 4, 10 * GBIT))
    assert [worker.compute_percent for worker in where.workers] == [100, 100, 32, 32]
    assert [worker.host for worker in where.workers] == [0, 1, 2, 3]


def test_periods_of_one_rate_are_that_rate_and_mercury_gains_most_where_others_lose_link():
    once, thrice = (mercury_baselines._gains("resnet50", rates, (mercury_baselines.DEFAULT,)) for rates in ((1.0,), (1.0,) * 3))
    assert once == pytest.approx(thrice)
    profile = mercury_model.profile_of("resnet50")
    whole, part = (
        judge(mercury_baselines.DEFAULT.policy, Case(profile, servers(4, round(share * GBIT))), bound_ns=0).iteration_ns
        for share in (1.0, 0.73)
    )
    gain_at_equal_links = (
        whole / judge(mercury_baselines.MERCURY.policy, Case(profile, servers(4, GBIT)), bound_ns=0).iteration_ns - 1
    )
    assert once[0] / 100 + 1 == pytest.approx((gain_at_equal_links + 1) * part / whole)


def test_kvstore_divides_large_arrays_over_all_servers_and_deals_the_others():
    profile = chain((100, 4 * 10**6, 0, 0), (0, 4 * 10**6, 0, 0))
    where = servers(2, GBIT)
    divided = dealt_ns(profile, where, divided_elements=10**6)
    assert divided == dealt_ns(profile, where, divided_elements=1)
    assert divided < dealt_ns(profile, where, divided_elements=10**6 + 1)


def test_an_instance_of_prophets_testbed_limits_its_server_too():
    where = prophet.instances([GBIT, 2 * GBIT])
    assert [host.up.bytes_per_second for host in where.hosts] == [2 * GBIT, GBIT, 2 * GBIT]
    assert prophet.instances([GBIT], server_rate=10 * GBIT).hosts[0].down == Link(10 * GBIT)


def test_bytepss_pushes_go_at_once():
    profile, where = prophet._model("resnet50", 64), prophet.instances([GBIT] * prophet.WORKERS)
    assert prophet.BYTEPS.plan(profile, where).lanes[0].window_bytes > profile.size_bytes


def test_prophets_policies_are_level_at_ten_gigabits_with_one_server_on_a_host_of_its_own():
    where = prophet.instances([10 * GBIT] * prophet.WORKERS)
    assert (len(where.servers), len(where.workers), len(where.hosts)) == (1, 3, 4)
    three = (prophet.PROPHET, prophet.BYTEPS, prophet.P3)
    row = prophet._row("f", "w", (1.0, 1.0, 1.0), three, prophet._model("resnet50", 64), 64, where)
    assert isinstance(row.ours, tuple)
    assert max(row.ours) == pytest.approx(min(row.ours), rel=0.01)


@pytest.mark.slow
def test_a_search_is_done_when_it_tries_what_is_within_two_per_cent_of_the_best():
    slope = Prior(np.log(np.array([2.0, 1.5, 1.01, 1.0])))  # its third of four points is within a hundredth
    assert searches.trials(Grid.regular(1, steps=4), slope, seed=0) == 3
    assert searches.trials(Grid.regular(1, steps=2), slope, seed=0) == 2
    assert searches.trials(GaussianProcess(1, 0, slope), slope, seed=0) == 1
    never = Grid(iter([(0.0,)] * 1000))
    assert searches.trials(never, slope, seed=0) == searches.AT_MOST


def cell(step_ns: int, alone_ns: int = 1) -> Cell:
    profile = zoo.profile("alexnet")
    plan = FirstCome(partition_bytes=100 * MB).plan(profile, Network.line(2, 0, 10**9))
    return Cell([step_ns], plan, Timeline(plan.fingerprint, 0, ()), alone_ns, None)


def test_a_point_keeps_the_ratio_of_computing_to_communicating():
    profile = zoo.profile("alexnet")
    slow = lab.HostSpec(1, Link(125 * MB), Link(125 * MB))
    point = Point(profile, 10**10, (arm("wfbp"),), 0.1, stretch=2.0, unlike=(slow,))
    assert point.made().compute_ns == pytest.approx(2 * profile.compute_ns, rel=1e-6)
    assert point.spec().links(0) == (Link(62_500_000), Link(62_500_000))  # a twentieth: a tenth of the bytes in twice the time
    assert point.spec().links(1) == (Link(6_250_000), Link(6_250_000))


def test_what_a_paper_states_in_bytes_is_as_small_in_the_lab_as_tensors_are():
    slices = arm("geryon", knobs={"slice_bytes": 2**20, "threshold_percent": 100}, packet_bytes=256_000)
    smaller = Point(zoo.profile("alexnet"), 10**10, (slices,), 0.01).smaller(slices)
    assert smaller.knobs == {"slice_bytes": 10486, "threshold_percent": 100}
    assert smaller.packet_bytes == 2560  # a multiple of 64


def test_servers_of_their_own_are_on_hosts_of_their_own():
    spec = Point(zoo.profile("alexnet"), 10**10, (arm("wfbp"), arm("wfbp", name="one", servers=1)), 0.1, hosts=4).spec()
    assert (spec.hosts, spec.jobs) == (5, (lab.JobSpec((0, 1, 2, 3), (4,)),))


def test_first_come_moves_every_byte_once_in_the_order_of_readiness():
    profile = zoo.profile("alexnet")
    plan = FirstCome(partition_bytes=4 * MB, credit_bytes=8 * MB).plan(profile, Network.line(2, 0, 10**9))
    check_plan(plan, profile.specs)
    assert [message.slices[0].tensor for message in plan.messages] == sorted(m.slices[0].tensor for m in plan.messages)
    assert {message.priority for message in plan.messages} == {0}


def test_a_cell_that_takes_half_as_long_is_twice_as_fast():
    ours, other = cell(50, alone_ns=40), cell(100)
    assert operating.ratio("f", "w", None, ours, other).lab == 2.0
    assert operating.faster("f", "w", None, ours, other).lab == 100.0
    assert operating.of_best("f", "w", None, other, [ours, other]).lab == 0.5
    assert operating.efficiency("f", "w", None, ours).lab == 80.0
    assert operating.ratio("f", "w", None, ours, other).simulated is None


def test_the_labs_part_of_the_page_stands_without_rows_and_sorts_those_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(lab_results, "MEASURED", tmp_path / "measured.json")
    assert all(f"### {name}" in lab_page.section() for name in lab_page.PAPERS)
    assert "| figure |" not in lab_page.section()
    rows = [
        Measured("Mercury Fig. 17", "packets", "less", None, 0.9, "x"),
        Measured("Mercury Fig. 4", "partitions", None, 1.0, 0.5, "x"),
    ]
    lab_results.write(rows)
    section = lab_page.section()
    assert section.index("| Fig. 4 | partitions | plot | 0.5 x | 1 x |") < section.index(
        "| Fig. 17 | packets | less | 0.9 x | - |"
    )


def test_each_experiment_of_the_lab_has_a_name_of_its_own():
    names = [name for paper in lab_page.PAPERS.values() for name in paper.EXPERIMENTS]
    assert len(names) == len(set(names))


def test_each_claim_of_a_paper_was_measured_by_the_command_that_stands_beside_it():
    rows = lab_results.read()
    measured = {(row.figure, row.what) for row in rows}
    of_papers = {name: set(paper.EXPERIMENTS) for name, paper in lab_page.PAPERS.items()}
    for each in claims.CLAIMS:
        assert (each.figure, each.what) in measured
        assert each.experiment in next(names for paper, names in of_papers.items() if each.figure.startswith(f"{paper} "))
    assert {paper for paper in of_papers for each in claims.CLAIMS if each.figure.startswith(f"{paper} ")} == set(of_papers)
    assert claims.table(rows).count("\n") == len(claims.CLAIMS) + 1
    assert claims.table([]).count("\n") == 1


def test_every_published_value_has_a_row_or_a_reason_in_the_notes_that_are_there():
    text = brief.NOTES.read_text()
    for name, left in not_compared.NOT_COMPARED.items():
        paper = importlib.import_module(f"experiments.{name}").TITLE.split(" (")[0]
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {paper} | ") and line.count("|") == 8)
        published, reasons, compared = map(int, line.split(" | ")[1:4])
        assert reasons == sum(each.values for each in left)
        assert reasons + compared >= published


def test_the_page_of_the_papers_has_the_values_of_the_notes():
    shown = brief.page(brief.NOTES.read_text())
    assert (Path(__file__).parents[2] / "docs" / "papers.md").read_text() == shown
    assert len(brief.BRIEFS) == len(not_compared.NOT_COMPARED)
    with pytest.raises(KeyError):
        brief.page(
            brief.NOTES.read_text().replace(
                "| Fig. 13 | ResNet-50, 10 Gbit/s: tuned", "| Fig. 13 | ResNet-50, 10 Gbit/s: guessed"
            )
        )


@pytest.mark.slow
def test_a_picture_has_each_published_value_beside_the_simulated_one_and_is_drawn_the_same_twice(tmp_path):
    rows = [
        Row("Table III", f"{model}, 40 Gbit/s: vanilla, Geryon", (50.0, published), (40.0, ours), "%")
        for model, published, ours in (("alexnet", 95.0, 99.0), ("vgg19", 94.0, 98.0))
    ]
    rows = [row._replace(figure=table) for table in ("Table II", "Table III") for row in rows]
    picture, other = pictures.pictures("geryon", rows)
    assert picture.names == other.names == ("alexnet", "vgg19")
    values = {(line.label, line.published): [value for _, value in line.points] for line in picture.lines}
    assert values == {
        ("vanilla", True): [50.0, 50.0], ("vanilla", False): [40.0, 40.0],
        ("Geryon", True): [95.0, 94.0], ("Geryon", False): [99.0, 98.0],
    }  # fmt: skip
    first = pictures.draw(picture, tmp_path).read_bytes()
    assert first == pictures.draw(picture, tmp_path).read_bytes()
    assert b"Geryon Table II" in first
