"""What a script sets for all of torch or of Python is neither in gradlane's way, nor is gradlane in its way."""

from __future__ import annotations

import pytest

from tests.live.settings import MODES, SETTINGS

DEVICE = "another default device"


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("whole", [True, False], ids=["from attach on", "in each step"])
def test_a_loop_has_the_bits_of_ddp_and_defers_updates_unless_a_mode_sees_them(two_ranks, setting, whole):
    for differs, deferred in two_ranks.run("tests.live.settings:beside_ddp", setting=setting, whole=whole):
        assert differs == []
        assert (deferred > 0) is (setting not in MODES)


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
