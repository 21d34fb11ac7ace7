"""gradlane.DistributedDataParallel in the place of torch's: DDP's bits, and the updates deferred."""

from __future__ import annotations

import pytest

from tests.live.loops import LOOPS

NAMES = [
    "step_lr",
    "two_optimizers",
    "accumulation_with_no_sync",
    "clip_grad_norm",
    "a_closure_that_is_run_once",
    "averages_of_the_model",
    "forward_passes_for_buffers_alone",
    "buffers_of_its_own_on_each_rank",
    "evaluation_of_another_kind_on_each_rank",
    "half_and_back_for_a_save",
    "parametrized_in_the_middle",
    "a_branch_left_out_by_one_rank_only",
    "a_compiled_step",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_with_the_drop_in_gives_the_bits_of_ddp_and_defers_updates(two_ranks, name):
    for found in two_ranks.run("tests.live.loops:compare", name=name, arms=["drop-in"]):
        found = found["drop-in"]
        assert (found["error"], found["differs"]) == ("", [])
        assert LOOPS[name].defers is not True or found["deferred"] > 0
