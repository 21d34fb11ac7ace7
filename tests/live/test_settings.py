"""What a script sets for all of torch or of Python is neither in gradlane's way, nor is gradlane in its way."""

from __future__ import annotations

import pytest
import torch

from tests.live.settings import HELD, MODES, SETTINGS

DEVICE = "another default device"


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("held", HELD)
def test_a_loop_has_the_bits_of_ddp_and_defers_updates_unless_a_mode_sees_them(two_ranks, setting, held):
    for differs, deferred in two_ranks.run("tests.live.settings:beside_ddp", setting=setting, held=held):
        assert differs == []
        assert (deferred > 0) is (setting not in MODES)


# each has other bits where the update runs under the settings of the forward pass
@pytest.mark.parametrize(
    ("setting", "optimizer"),
    [
        ("autocast", "Adafactor"),
        ("no kernels of oneDNN", "Muon"),
        ("float64 by default", "Adam"),
        ("denormals flushed", "SGD"),
    ],
)
def test_a_deferred_update_runs_under_the_settings_of_its_step(two_ranks, setting, optimizer):
    if not hasattr(torch.optim, optimizer):
        pytest.skip(f"torch {torch.__version__} has no {optimizer}")
    options = {"held": "at optimizer.step()", "optimizer": optimizer, "verify": True}
    for differs, deferred in two_ranks.run("tests.live.settings:beside_ddp", setting=setting, **options):
        assert differs == []
        assert deferred > 0


@pytest.mark.parametrize(
    ("policy", "backend"),
    [
        ("ddp", "all-reduce"),
        ("owners", "all-reduce"),
        ("dear", "all-reduce"),
        ("bytescheduler", "server"),
        ("mercury", "server"),
    ],
)
def test_what_gradlane_makes_for_itself_does_not_lie_on_the_default_device(two_ranks, policy, backend):
    options = {"policy": policy, "backend": backend, "verify": True}
    for differs, _ in two_ranks.run("tests.live.settings:beside_ddp", setting=DEVICE, **options):
        assert differs == []


@pytest.mark.parametrize("options", [{}, {"order": "coordinator"}], ids=["planned", "coordinated"])
def test_nor_does_what_measures_the_network(two_ranks, options):
    how = {"policy": "auto", "backend": None, "measures": True}
    for differs, _ in two_ranks.run("tests.live.settings:beside_ddp", setting=DEVICE, **how, **options):
        assert differs == []


@pytest.mark.parametrize("policy", ["bytescheduler", "dear", "owners"])
def test_a_profiler_does_not_record_collectives_that_may_end_after_it(two_ranks, policy):
    assert two_ranks.run("tests.live.settings:recorded", policy=policy) == [[], []]
