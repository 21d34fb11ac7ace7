"""What a session says of each step: over both backends, in the drop-in, and as a line."""

from __future__ import annotations

import re

import pytest
from torch import nn

import gradlane
from tests.commands import EXAMPLE, ROOT
from tests.commands import gradlane as run_command
from tests.live.metrics import LAYER_S
from tests.live.ranks import Ranks
from tests.ports import free_port

BYTES = 4 * (32 * 64 + 64 + 64 * 4 + 4)


@pytest.mark.parametrize("how", ["without sums", "in one loss"])
def test_a_step_of_several_passes_is_one_step_of_the_timeline_and_one_forward_pass_of_the_profile(two_ranks, how):
    for iterations, shortest_ns, forward_ns, passes in two_ranks.run("tests.live.metrics:several_passes", how=how):
        assert iterations == list(range(iterations[0], 7))
        assert min(shortest_ns, forward_ns) >= 4 * LAYER_S * 1e9
        assert passes[1:] == [1] * (len(iterations) - 1)  # the plan came after the first one


# 8 steps: of the first there is no whole one yet, and the plan is there from the fifth on
@pytest.mark.parametrize(("policy", "backend", "messages"), [("wfbp", "all-reduce", 4), ("p3", "server", 4)])
def test_metrics_are_of_the_last_whole_step(two_ranks, policy, backend, messages):
    for found in two_ranks.run("tests.live.metrics:numbers", policy=policy, backend=backend):
        assert [each["step"] for each in found] == list(range(8))
        assert (found[0]["step_seconds"], found[0]["exposed_seconds"], found[0]["hidden"]) == (None, None, None)
        assert (found[0]["policy"], found[-1]["policy"]) == ("ddp", policy)
        assert found[0]["bound_seconds"] is None
        for each in found[1:]:
            assert 0 <= each["exposed_seconds"] <= each["step_seconds"]
            assert 0 <= each["hidden"] <= 1
        assert (found[-1]["bytes"], found[-1]["messages"], found[-1]["backend"]) == (BYTES, messages, backend)
        assert 0 < found[-1]["computing_seconds"] <= found[-1]["bound_seconds"]
        assert not found[-1]["searching"]


def test_a_wait_for_buffers_is_a_wait_too(two_ranks):
    exposed_s, _ = two_ranks.run("tests.live.metrics:waits_for_buffers")
    assert exposed_s > 0.1


def test_a_second_pass_of_a_step_is_measured_without_the_sums_of_the_first(two_ranks):
    assert two_ranks.run("tests.live.metrics:waits_in_second_passes") == [[0, 0, 0]] * 2


def test_a_wrapped_model_has_them_once_it_is_attached(two_ranks):
    for found in two_ranks.run("tests.live.metrics:numbers", policy="wfbp", backend="all-reduce", drop_in=True):
        assert len(found) == 7  # torch sums the first step
        assert found[-1]["step"] == 6
        assert found[-1]["step_seconds"] > 0


@pytest.mark.parametrize("backend", ["all-reduce", "server"])
def test_one_rank_sends_nothing(backend):
    alone = Ranks(1)
    try:
        (found,) = alone.run("tests.live.metrics:numbers", policy="wfbp", backend=backend)
    finally:
        alone.close()
    assert found[-1]["policy"] == "wfbp"
    assert found[-1]["step_seconds"] > 0
    assert [(each["bytes"], each["messages"], each["hidden"]) for each in found] == [(0, 0, None)] * len(found)


def test_one_process_alone_has_the_same_names():
    alone = gradlane.attach(nn.Linear(2, 2)).metrics()
    assert set(alone) == set(gradlane.StepMetrics.__annotations__)
    assert alone["step_seconds"] is None


def test_rank_0_knows_who_is_busy_for_longest_and_all_know_how_many_plans_there_were(two_ranks):
    first, second = two_ranks.run("tests.live.metrics:numbers", policy="wfbp", backend="all-reduce", steps=14)
    assert [(each["slowest_rank"], each["slowest_busy_seconds"]) for each in second] == [(None, None)] * 14
    assert first[4]["slowest_rank"] is None  # five whole steps have to be over
    assert first[-1]["slowest_rank"] in (0, 1)
    assert first[-1]["slowest_busy_seconds"] > 0
    assert [each["plans"] for each in (first[0], first[-1], second[-1])] == [1, 2, 2]


def exported(to: str, package: str) -> list[str]:
    """What each of two ranks has given away."""
    pytest.importorskip(package)
    own = Ranks(2)  # such a library keeps state
    try:
        found: list[str] = own.run("tests.live.metrics:exported", to=to, ports=[free_port(), free_port()])
    finally:
        own.close()
    return found


def test_prometheus_collects_what_the_dashboard_of_grafana_shows():
    first, second = exported("prometheus", "prometheus_client")
    shown = set(re.findall(r"gradlane_\w+", (ROOT / "examples" / "grafana.json").read_text()))
    assert len(shown) == 10
    assert shown <= set(re.findall(r"^(gradlane_\w+)", first, re.MULTILINE))
    assert "gradlane_step 12.0" in second
    assert "gradlane_slowest_rank" not in second  # which rank 0 alone knows


def test_opentelemetry_has_a_gauge_for_each_number():
    first, _ = exported("opentelemetry", "opentelemetry.sdk")
    names = {f"gradlane.{name}" for name in gradlane.StepMetrics.__annotations__ if name not in ("policy", "backend")}
    assert names <= set(re.findall(r'"name": "(gradlane\.\w+)"', first))
    assert '"rank": 0' in first


@pytest.mark.parametrize(
    ("to", "package", "leaves"),
    [
        ("tensorboard", "tensorboard", r"runs/events\.out\.tfevents\S*: \d{3,}"),
        ("wandb", "wandb", r"wandb/offline-run-\S*\.wandb: \d{3,}"),
        ("mlflow", "mlflow", r"mlruns/0/\w+/metrics/step_seconds: \d{3,}"),
    ],
)
def test_other_monitoring_keeps_what_it_is_given(to, package, leaves):
    first, _ = exported(to, package)
    assert re.search(leaves, first)


def test_rank_0_says_how_it_goes(two_ranks):
    lines, _ = two_ranks.run("tests.live.metrics:lines")
    assert len(lines) == 5
    said = r"gradlane: step 1: [\d.]+ ms a step; [\d.]+ ms of it waiting for sums \(\d+%\); ddp over all-reduce, 1 messages"
    assert re.fullmatch(said, lines[0])
    assert re.search(r"simulated bound [\d.]+ ms; wfbp over all-reduce, 4 messages", lines[-1])


def test_lines_of_a_second_session_begin_with_its_number_and_model(two_ranks):
    lines, _ = two_ranks.run("tests.live.metrics:lines_of_two")
    assert len(lines) == 2
    assert re.match(r"gradlane: session \d+, Sequential, step 1: [\d.]+ ms a step; ", lines[-1])


def test_launch_prints_lines_and_leaves_a_report(tmp_path):
    report = tmp_path / "report.html"
    done = run_command("launch", "--nproc", 2, "--progress", "0.001", "--report", report, EXAMPLE)
    assert len(re.findall(r"gradlane: step \d+: .* ms a step", done.stderr)) > 10
    assert re.search(r"; rank [01] was busy for longest in the last 5 steps, [\d.]+ ms each\n", done.stderr)
    assert f"{report} is a report that opens in a browser" in done.stdout
    assert report.read_bytes().startswith(b"<!doctype html>")
