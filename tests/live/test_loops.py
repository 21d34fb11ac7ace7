"""Loops as people write them do under gradlane what they do under DDP, or are told why not."""

from __future__ import annotations

import pytest
import torch

from tests.live.cases import differences
from tests.live.loops import LOOPS
from tests.live.ranks import Ranks


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_gives_the_bits_of_ddp(two_ranks, name):
    outcomes = two_ranks.run("tests.live.loops:compare", name=name)
    for rank, outcome in enumerate(outcomes):
        for policy, found in outcome.items():
            assert found["differs"] == [], (rank, policy)
    for policy in ("bytescheduler", "blocks"):
        deferred = [outcome[policy]["deferred"] > 0 for outcome in outcomes]
        if LOOPS[name].defers is not None:
            assert deferred == [LOOPS[name].defers] * 2, policy
        lines = outcomes[0][policy]["lines"]
        if LOOPS[name].says:
            assert len(lines) == 1
            assert LOOPS[name].says in lines[0]
        else:
            assert lines == []
        assert outcomes[1][policy]["lines"] == []


@pytest.mark.parametrize("order", ["planned", "coordinator"])
def test_four_ranks_end_alike_and_as_under_ddp_but_for_rounding(four_ranks, order):
    outcomes = four_ranks.run("tests.live.loops:train_alike", policy="bytescheduler", order=order)
    reference, first = outcomes[0]
    for _, other in outcomes[1:]:
        assert differences(first, other) == []
    for name, value in reference.items():
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-5)


def test_a_group_of_all_ranks_is_trained_in_and_one_of_some_is_refused(two_ranks):
    assert two_ranks.run("tests.live.loops:train_in_a_group_of_all_ranks") == [[], []]
    said = two_ranks.run("tests.live.loops:attach_to_some_ranks")
    assert said[0] == "process_group has 1 of the 2 ranks, expected one of all ranks"
    assert said[1] == "process_group does not have this rank, expected one of all ranks"


@pytest.mark.parametrize("failing", [[0, 1], [1]])
def test_an_exception_in_backward_that_the_script_catches_is_an_error_on_all_ranks(failing):
    ranks = Ranks(2)  # of its own: sums are left half done
    try:
        outcomes = ranks.run("tests.live.loops:unfinished_backward", failing=failing)
        for rank, (kind, text) in enumerate(outcomes):
            # where both fail, either may hear of the other before it finds out itself
            assert kind in ("JobError", "PeerFailed") if rank in failing else kind == "PeerFailed"
            assert "iteration 3: the backward pass was left unfinished" in text
        assert "JobError" in [kind for kind, _ in outcomes]
    finally:
        ranks.close()
