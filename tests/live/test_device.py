"""The commands for machines with a GPU, on this one: they skip what they cannot do, and their dry runs work."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.commands import ROOT

LIMIT_S = 300


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_every_check_is_skipped_with_its_reason(tmp_path):
    out = tmp_path / "tests.json"
    done = run("tests.device", "--out", str(out))
    assert done.returncode == 0, done.stderr
    checks = json.loads(out.read_text())["checks"]
    assert {(check["outcome"], check["reason"]) for check in checks} == {("skipped", "this machine has no CUDA device")}
    assert {check["carrier"] for check in checks} == {"all-reduce", "server"}
    done = run("bench.device")
    assert done.returncode == 0, done.stderr
    assert "--dry-run" in done.stdout


def test_the_stand_in_makes_a_check_over_each_carrier(tmp_path):
    out = tmp_path / "tests.json"
    done = run("tests.device", "--stand-in", "--only", "step lr", "--jobs", "1", "--limit", str(LIMIT_S), "--out", str(out))
    assert done.returncode == 0, done.stdout
    checks = json.loads(out.read_text())["checks"]
    assert {(check["carrier"], check["outcome"]) for check in checks} == {("all-reduce", "passed"), ("server", "passed")}


def test_a_check_that_time_is_up_for_is_left_out_and_fails_the_run(tmp_path):
    out = tmp_path / "tests.json"
    done = run("tests.device", "--stand-in", "--only", "step lr", "--limit", "0", "--out", str(out))
    assert done.returncode == 1
    checks = json.loads(out.read_text())["checks"]
    assert [(check["outcome"], check["reason"]) for check in checks] == [("left out", "the limit of 0 s for all was over")] * 2


@pytest.mark.extra
def test_a_dry_run_trains_arms_in_turns_to_equal_losses(tmp_path):
    out = tmp_path / "bench.json"
    arms = "ddp,blocks@all-reduce,mercury@server"
    few = ("--models", "bert-base", "--arms", arms, "--turns", "1", "--loopback", "--limit", str(LIMIT_S))
    done = run("bench.device", "--dry-run", "--part", "training", *few, "--out", str(out))
    assert done.returncode == 0, done.stdout
    lines = json.loads(out.read_text())["lines"]
    turns = [line for line in lines if line["kind"] == "turn"]
    assert [line["arm"] for line in turns] == arms.split(",")
    assert all(len(line["step_ms"]) == 4 for line in turns)
    losses = [line for line in lines if line["kind"] == "losses"]
    assert [(line["arm"], line["equal"]) for line in losses] == [(arm, True) for arm in arms.split(",")[1:]]
