"""Ranks with inputs in different numbers: the session's `join()` beside DDP's."""

from __future__ import annotations

import pytest

from tests.live.cases import differences
from tests.live.ranks import Ranks
from tests.processes import AT_ONCE_S

pytestmark = pytest.mark.matrix

CASE = "tests.live.uneven:"
OVER = [("bytescheduler", "all-reduce"), ("mercury", "server"), ("dear", "all-reduce")]


@pytest.mark.parametrize(("policy", "backend"), OVER)
def test_two_ranks_train_as_under_ddps_join(two_ranks, policy, backend):
    epochs = [(8, 6), (4, 9), (5, 5), (0, 3), (2, 0)]
    for found in two_ranks.run(
        CASE + "equals_ddp", policy=policy, backend=backend, epochs=epochs, join={}, profile_iterations=1
    ):
        assert found["differs"] == []
        assert found["settled"]
        if policy != "dear":
            assert found["deferred"] > 0


@pytest.mark.parametrize("first", [(0, 6), (6, 0), (1, 6), (2, 2)])
def test_a_rank_may_be_without_inputs_before_there_is_a_plan(two_ranks, first):
    options = {"policy": "bytescheduler", "backend": "all-reduce", "epochs": [first, (4, 4)], "join": {}}
    for found in two_ranks.run(CASE + "equals_ddp", **options):
        assert found["differs"] == []


@pytest.mark.parametrize("counts", [(7, 4), (4, 7)])
def test_sums_may_be_divided_by_those_who_still_come(two_ranks, counts):
    join = {"divide_by_initial_world_size": False}
    epochs = [counts, (3, 3)]
    for found in two_ranks.run(CASE + "equals_ddp", policy="bytescheduler", backend="all-reduce", epochs=epochs, join=join):
        assert found["differs"] == []


def test_auto_goes_on_looking_while_ranks_join(two_ranks):
    options = {"policy": "auto", "backend": None, "epochs": [(60, 20), (10, 40)], "join": {}}
    for found in two_ranks.run(CASE + "equals_ddp", **options):
        assert found["differs"] == []


def test_passes_without_sums_and_evaluations_inside(two_ranks):
    assert two_ranks.run(CASE + "evaluated_meanwhile") == [[], []]


def test_four_ranks_end_alike(four_ranks):
    first, *others = four_ranks.run(CASE + "ends_alike", epochs=[(3, 8, 5, 8), (6, 1, 6, 0)])
    for other in others:
        assert differences(first, other) == []


def test_asked_to_end_early_it_raises_on_all_ranks_and_the_session_goes_on(two_ranks):
    for rank, (text, updated) in enumerate(two_ranks.run(CASE + "ends_early", counts=(3, 7))):
        assert text.startswith("UnevenInputsError: ")
        assert f"rank {rank}: 1 of 2 ranks have no input left" in text
        assert ("this rank among them" in text) == (rank == 0)
        assert updated > 0


def test_what_would_need_every_rank_is_refused(two_ranks):
    for buffers, verify in two_ranks.run(CASE + "refused"):
        assert buffers.startswith("UnsupportedError: join(): the model's buffers follow rank 0's")
        assert verify.startswith("UnsupportedError: join(): verify")


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("backend", ["all-reduce", "server"])
def test_a_rank_that_is_killed_while_the_other_has_joined_is_named(victim, backend):
    ranks = Ranks(2)
    try:
        ok, (text, seconds) = ranks.try_run(CASE + "killed", victim=victim, backend=backend)[1 - victim]
        assert ok
        assert text.startswith("PeerDied: ")
        assert f"rank {victim}" in text
        assert seconds < AT_ONCE_S
    finally:
        ranks.close()


def test_a_block_that_is_switched_off_does_nothing(two_ranks):
    options = {"policy": "wfbp", "backend": "all-reduce", "epochs": [(4, 4)], "join": {"enable": False}}
    for found in two_ranks.run(CASE + "equals_ddp", **options):
        assert found["differs"] == []
