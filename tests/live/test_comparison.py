"""The worker of comparisons, where it does what `gradlane compare` does not ask for: finals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradlane import zoo
from gradlane.compare.arms import ALONE, BASELINE, ArmSpec, measured_place
from gradlane.compare.processes import run_on_loopback
from gradlane.compare.runner import Trial, at_ratio, cells_of, train_in_turns
from gradlane.core import files
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.records.search_log import ANY, AUTO

POLICIES = ("wfbp", "mg-wfbp", "blocks")


@pytest.mark.extra
def test_only_the_two_fastest_of_each_backend_meet_ddp_in_the_finals_and_all_have_its_bits(tmp_path: Path) -> None:
    profile, _, scale = at_ratio(zoo.profile("alexnet"), 1, 20, 0.5)
    arms = [ArmSpec(policy, backend) for backend in ("all-reduce", "server") for policy in POLICIES]

    def start(command: list[str]) -> int:
        return run_on_loopback(command[1:], 2, {"GRADLANE_LAB_SCALE": str(scale)})

    how = {"rounds": 1, "steps": 2, "timeout_s": 60.0, "finals": 2}
    assert train_in_turns(profile, arms, tmp_path, start, **how) == 0
    found: dict[str, Any] = json.loads((tmp_path / "rank-0.json").read_text())["arms"]
    assert list(found) == [BASELINE, ALONE, *(arm.name for arm in arms)]
    assert all(arm["equal_to_ddp"] for name, arm in found.items() if name != ALONE)
    assert all(len(arm["step_ns"]) == 2 for arm in found.values())
    for backend in ("all-reduce", "server"):
        own = [arm.name for arm in arms if arm.backend == backend]
        fastest = sorted(own, key=lambda name: sum(found[name]["step_ns"]))[:2]
        assert {name for name in own if found[name]["final_step_ns"]} == set(fastest)
    finalists = [arm for name, arm in found.items() if arm["final_step_ns"]]
    assert len(finalists) == 5
    assert all(len(arm["final_step_ns"]) == 4 for arm in finalists)
    assert found[BASELINE] in finalists


@pytest.mark.extra
def test_an_arm_of_auto_that_is_told_no_backend_is_simulated_over_the_one_that_it_chose(tmp_path: Path) -> None:
    profile, bits, scale = at_ratio(zoo.profile("alexnet"), 1, 20, 0.5)
    arm = ArmSpec(AUTO, ANY)
    trial = Trial(profile, 2, bits, scale, False, [arm, ArmSpec("mercury", "server")], 1, 2, 0, 60.0)

    def start(command: list[str]) -> int:
        return run_on_loopback(command[1:], 2, {"GRADLANE_LAB_SCALE": str(scale)})

    assert train_in_turns(profile, trial.arms, tmp_path, start, rounds=1, steps=2, timeout_s=60.0) == 0
    plan = files.read(tmp_path / "plan-auto@any-rank0.json", Plan)
    place = measured_place(tmp_path, arm.name, arm, plan)
    assert place.backend == plan.backend
    assert place.network == files.read(tmp_path / "network-auto@any-rank0.json", Network)
    cells = {cell.arm: cell for cell in cells_of(trial, tmp_path)}
    assert cells["auto@any"].equal_to_ddp
    assert cells["auto@any"].predicted_ns >= cells["auto@any"].bound_ns
