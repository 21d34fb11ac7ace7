"""`verify` finds what differs from DDP, names it, and finds nothing where nothing does."""

from __future__ import annotations

import pytest

from gradlane.live import VerifyOptions
from tests.live.ranks import Ranks
from tests.live.verified import KEEPS

pytestmark = pytest.mark.matrix


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
    (line,) = lines
    assert line.startswith("gradlane: verified 3 of 8 steps, ")
    assert f" of {verified:,} updates deferred: equal to DDP bit for bit" in line
    assert silent == []


def test_verified_steps_defer_as_many_updates_as_others(two_ranks):
    (verified, line), _ = two_ranks.run("tests.live.verified:deferred_by_step", every=2)
    (others, nothing), _ = two_ranks.run("tests.live.verified:deferred_by_step", every=0)
    assert verified == others
    assert nothing == ""
    deferred = sum(verified[2::2])  # in the first iteration all parameters are watched
    assert deferred >= 10
    assert f" {deferred:,} of " in line


@pytest.mark.parametrize("verify", [True, False], ids=["in verified steps", "in those that cross the barrier first"])
def test_an_optimizer_that_needs_all_gradients_at_once_is_found(verify):
    ranks = Ranks(2)  # of its own: the job fails
    try:
        errors = ranks.run("tests.live.verified:an_optimizer_needs_all_gradients", verify=verify)
    finally:
        ranks.close()
    assert any("its value after the update differs" in error for error in errors)
    assert any("leave it out for _ByTheGlobalNorm" in error for error in errors)


def test_a_forward_pass_that_is_not_seen_is_reported_and_refused_where_steps_are_verified(two_ranks):
    said = two_ranks.run("tests.live.verified:a_forward_pass_is_not_seen", verify=False)
    assert [error for error, _ in said] == ["nothing", "nothing"]
    assert [len([line for line in lines if "has seen no forward pass" in line]) for _, lines in said] == [1, 0]
    ranks = Ranks(2)  # of its own: the job fails
    try:
        refused = ranks.run("tests.live.verified:a_forward_pass_is_not_seen", verify=True)
    finally:
        ranks.close()
    assert all("followed no forward pass" in error for error, _ in refused)


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


@pytest.mark.parametrize("what", KEEPS)
def test_an_optimizer_of_the_scripts_own_steps_once_whatever_it_keeps(two_ranks, what):
    outcomes = two_ranks.run("tests.live.verified:an_optimizer_keeps", what=what, verify=True)
    for differs, lines, deferred in outcomes:
        assert (differs, deferred) == ([], 0)
        assert not any("Error" in line for line in lines)
    assert outcomes[0][1][-1].endswith(": sums equal to those of DDP bit for bit; no update was compared")


@pytest.mark.parametrize("what", ["a counter in an object", "a nested counter", "a lock", "NaN", "modules", "a method"])
def test_deferred_updates_of_a_vouched_optimizer_have_what_step_had(two_ranks, what):
    for differs, lines, deferred in two_ranks.run("tests.live.verified:an_optimizer_keeps", what=what, cross_barrier=True):
        assert differs == []
        assert not any("Error" in line for line in lines)
        assert deferred > 0


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("momentum beside the state", "VerificationError: "),
        ("slots", "UnsupportedError: cross_barrier: got True, and _KeepsInSlots keeps calls in __slots__"),
    ],
)
def test_a_vouched_optimizer_whose_parts_cannot_have_what_it_keeps_is_refused(two_ranks, what, said):
    outcomes = two_ranks.run("tests.live.verified:an_optimizer_keeps", what=what, cross_barrier=True)
    last = [lines[-1] for _, lines, _ in outcomes]
    assert any(line.startswith(said) for line in last)  # a rank may hear of the other's first
    assert all("leave it out" in line for line in last)
