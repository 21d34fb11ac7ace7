"""Stragglers in the planner, and the sentence that a what-if opens with."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from statistics import fmean

import pytest

from gradlane.planning.questions.jitter import slowdown, slowest_of
from tests.commands import facts_of, invoke


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (1, 0.0),
        (2, 1 / math.sqrt(math.pi)),
        (3, 1.5 / math.sqrt(math.pi)),
        (4, 6 / math.sqrt(math.pi) * math.atan(math.sqrt(2)) / math.pi),
        (100, 2.5075936364416847),
        (10**6, 4.862897486196463),
    ],
)
def test_the_slowest_of_some_is_the_known_mean_of_the_largest_of_normal_draws(devices, expected):
    assert slowest_of(devices) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_jitter_needs_no_package_that_is_not_installed_with_gradlane():
    program = (
        "import sys; sys.modules['scipy'] = None\nfrom gradlane.planning.questions.jitter import slowdown; slowdown(8, 0.05)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_slowest_of_sixteen_is_what_drawing_says():
    draw = random.Random(0).gauss
    drawn = fmean(max(1 + 0.05 * draw(0, 1) for _ in range(16)) for _ in range(20_000))
    assert slowdown(16, 0.05) == pytest.approx(drawn, abs=1e-3)


def test_more_devices_wait_longer_and_a_million_still_less_than_five_deviations():
    found = [slowest_of(devices) for devices in (1, 2, 8, 64, 1_000, 10**6)]
    assert found == sorted(found)
    assert 4.8 < found[-1] < 5


def test_scaling_counts_what_is_waited_for_the_slowest_device():
    def row(*options):
        (found,) = json.loads(invoke("simulate", "resnet50", "--workers", "4x8", "--policy", "ddp", "--json", *options))["rows"]
        return found

    steady, jittery = row("--rate", "1000gbit"), row("--rate", "1000gbit", "--jitter", "5%")
    assert jittery["oracle_ns"] == steady["oracle_ns"]
    assert jittery["bound_ns"] >= slowdown(32, 0.05) * steady["oracle_ns"] * 0.9999
    assert jittery["efficiency"] == pytest.approx(steady["efficiency"] / slowdown(32, 0.05), rel=0.02)


def test_a_plan_says_what_the_slowest_device_costs_and_bandwidth_is_searched_without():
    text = invoke("plan", "resnet50", "--workers", "16x8", "--jitter", "5%", "--policy", "ddp")
    assert "13.0% more with the slowest of 128 devices" in text
    assert "--jitter: got 5%, expected none" in invoke("whatif", "bandwidth", "resnet50", "--jitter", "5%", code=2)
    assert "--jitter" not in invoke("whatif", "bandwidth", "--help")


# -- sentences ---------------------------------------------------------------------------------------------------------


def first_line(*words):
    return invoke("whatif", *words).splitlines()[0]


def test_an_answer_says_where_a_schedule_matters_most_and_from_where_it_does_not(tmp_path):
    path = tmp_path / "page.html"
    words = ("resnet50", "--device", "v100", "--workers", "16", "--policy", "ddp", "--policy", "blocks")
    text = first_line("rates", *words, "--report", path)
    rows = json.loads(invoke("whatif", "rates", *words, "--json"))["rows"]
    by_rate = {}
    for row in rows:
        by_rate.setdefault(row["bits_per_second"], {})[row["policy"]] = row
    widest = max(by_rate, key=lambda rate: by_rate[rate]["blocks"]["efficiency"] - by_rate[rate]["ddp"]["efficiency"])
    there = by_rate[widest]
    bound = there["ddp"]["oracle_ns"] / there["ddp"]["bound_ns"]
    assert text.startswith(
        f"At {widest / 1e9:g} Gbit/s ddp reaches {there['ddp']['efficiency']:.0%} of linear, blocks "
        f"{there['blocks']['efficiency']:.0%}, no schedule more than {bound:.0%}; from "
    )
    (trial,) = facts_of(path)["trials"]
    assert trial["answer"] == text
    (chart,) = trial["charts"]
    lines = dict(chart["lines"])
    assert max(dict(map(tuple, lines["no more than"])).values()) == pytest.approx(
        max(100 * each["ddp"]["oracle_ns"] / each["ddp"]["bound_ns"] for each in by_rate.values())
    )


def test_where_no_schedule_helps_the_answer_says_so():
    text = first_line("rates", "resnet50", "--rate", "400gbit", "--workers", "2")
    assert text.startswith("No policy saves more than a percent of the time of ddp: at 400 Gbit/s ddp reaches ")


def test_a_target_is_kept_by_one_of_two_clusters_of_a_size_whichever_is_named_first():
    words = ("workers", "vgg16", "--rate", "10gbit", "--bus", "nvlink3", "--target", "0.9", "--policy", "ddp")
    expected = (
        "With hosts of 8 devices, ddp keeps 90% of linear up to 1x8 workers. With hosts of 1 device, no policy reaches 90%"
    )
    for hosts in ("1x8,8", "8,1x8"):
        assert expected in first_line(*words, "--workers", hosts)


def test_hosts_of_one_device_that_fail_a_target_are_no_limit_for_hosts_of_several():
    words = ("--batch", "128", "--compute-dtype", "bf16", "--mfu", "40%", "--bus", "nvlink3", "--rate", "50gbit")
    text = first_line("workers", "vit-l16", *words, "--workers", "1x8,2x8,8", "--target", "0.9", "--policy", "ddp")
    assert "With hosts of 8 devices, ddp keeps 90% of linear up to 2x8 workers." in text


def test_an_answer_says_up_to_how_many_workers_a_target_is_kept():
    words = ("workers", "vgg16", "--workers", "2..64", "--rate", "10gbit", "--policy", "ddp")
    rows = json.loads(invoke("whatif", *words, "--json"))["rows"]
    target = (rows[2]["efficiency"] + rows[3]["efficiency"]) / 2
    assert first_line(*words, "--target", f"{target:.4f}").startswith(
        f"ddp keeps {100 * float(f'{target:.4f}'):.4g}% of linear up to 8 workers"
    )
    nowhere = first_line("workers", "vgg16", "--workers", "64", "--rate", "1gbit", "--target", "0.9", "--policy", "ddp")
    assert nowhere.startswith("No policy reaches 90% of linear with 64 workers.")


def test_other_answers_are_sentences_too():
    words = ("vgg16", "--servers", "same", "--workers", "2")
    assert first_line("bandwidth", *words, "--policy", "mercury").startswith("90% of linear takes links of ")
    assert first_line("knobs", *words).startswith("The best partition is ")
    assert first_line("faster", "vgg16", "--workers", "4x8", "--policy", "ddp", "--halves").endswith("% with halves.")
