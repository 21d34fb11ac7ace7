"""`verify` finds what differs from DDP, names it, and finds nothing where nothing does."""

from __future__ import annotations

import pytest

from gradlane.live import VerifyOptions
from tests.live.ranks import Ranks


@pytest.mark.parametrize("backend", ["all-reduce", "server"])
@pytest.mark.parametrize(("model", "optimizer"), [("convolutions", "sgd"), ("tied-transformer", "adam")])
def test_training_that_is_right_passes_and_its_deferred_updates_are_verified(two_ranks, model, optimizer, backend):
    case = {"model": model, "optimizer": optimizer, "backend": backend}
    every_step = two_ranks.run("tests.live.verified:is_right", first=8, every=0, **case)
    for verified, deferred, _ in every_step:
        assert deferred > 0
        assert verified % 8 == 0
        assert verified >= 8 * 10
    some_steps = two_ranks.run("tests.live.verified:is_right", first=2, every=4, **case)
    assert [verified for verified, *_ in some_steps] == [3 * verified // 8 for verified, *_ in every_step]
    (verified, _, lines), (_, _, silent) = some_steps
    assert lines == [f"gradlane: verified 3 of 8 steps: sums and {verified} updates of parameters were as under DDP"]
    assert silent == []


def test_four_ranks_are_verified_within_rounding(four_ranks):
    case = {"model": "convolutions", "optimizer": "adam", "backend": "all-reduce", "first": 8, "every": 0}
    for verified, *_ in four_ranks.run("tests.live.verified:is_right", **case):
        assert verified >= 8 * 10


@pytest.mark.parametrize(
    ("case", "rank", "found"),
    [
        ("a_sum_is_damaged", 1, "the sum of its gradient differs"),
        ("an_update_is_made_twice", 0, "its value after the update differs"),
    ],
)
def test_what_is_wrong_is_named_on_all_ranks(case, rank, found):
    ranks = Ranks(2)  # of its own: sums are left half done
    try:
        errors = ranks.run(f"tests.live.verified:{case}")
    finally:
        ranks.close()
    assert errors[rank].startswith("VerificationError: verification: ")
    assert found in errors[rank]
    assert f"rank {rank}" in errors[1 - rank]


def test_an_optimizer_that_runs_its_closure_leaves_the_others_verified(two_ranks):
    # the weight and the bias of the other optimizer's layer, in each step
    assert two_ranks.run("tests.live.verified:one_of_two_optimizers_runs_a_closure") == [2 * 8] * 2


def test_which_iterations_are_verified():
    options = VerifyOptions(first=2, every=5)
    assert [step for step in range(12) if options.includes(step)] == [0, 1, 5, 10]
    assert [step for step in range(12) if VerifyOptions(first=1, every=0).includes(step)] == [0]
