"""Sessions over process groups of some of a job's ranks, several at the same time."""

from __future__ import annotations

import pytest

from tests.live.part_groups import GIVEN
from tests.live.ranks import Ranks

pytestmark = pytest.mark.matrix

NEIGHBOURS, STRIDED = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
SERVER = {"policy": "mercury", "backend": "server", "network": GIVEN}
ALL_REDUCE = {"policy": "bytescheduler", "network": GIVEN}


@pytest.mark.parametrize("split", [NEIGHBOURS, STRIDED], ids=["neighbours", "strided"])
@pytest.mark.parametrize("options", [ALL_REDUCE, SERVER], ids=["all-reduce", "server"])
def test_groups_of_two_train_at_the_same_time_with_ddps_bits(four_ranks: Ranks, split, options):
    assert four_ranks.run("tests.live.part_groups:train", split=split, **options) == [[True]] * 4


def test_a_group_of_two_finds_its_own_policy_among_both_carriers(four_ranks: Ranks):
    assert four_ranks.run("tests.live.part_groups:train", split=STRIDED) == [[True]] * 4


def test_the_drop_in_schedules_a_groups_gradients(four_ranks: Ranks):
    assert four_ranks.run("tests.live.part_groups:train_wrapped", split=STRIDED) == [[True, True]] * 4


@pytest.mark.parametrize("options", [ALL_REDUCE, SERVER], ids=["all-reduce", "server"])
def test_a_process_has_sessions_over_several_groups(four_ranks: Ranks, options):
    chain = [[0, 1], [1, 2], [2, 3]]  # ranks attach different numbers of times
    assert four_ranks.run("tests.live.part_groups:train", split=chain, **options) == [[True], [True] * 2, [True] * 2, [True]]


@pytest.mark.parametrize("options", [ALL_REDUCE, SERVER], ids=["all-reduce", "server"])
def test_halves_of_a_model_are_trained_in_groups_of_their_own(four_ranks: Ranks, options):
    assert four_ranks.run("tests.live.part_groups:train_a_grid", **options) == [True] * 4


def test_a_rank_outside_its_group_is_told_so_and_a_group_of_one_trains_alone(four_ranks: Ranks):
    outcomes = four_ranks.run("tests.live.part_groups:attach_to", ranks=[2])
    assert outcomes[2] == ("IdleSession", "")
    assert outcomes[1][0] == "InputError"
    assert outcomes[1][1].startswith("process_group: got a group without this process (rank 1), expected one that it is in")


@pytest.mark.parametrize("options", [ALL_REDUCE, SERVER], ids=["all-reduce", "server"])
def test_a_lost_rank_has_its_number_in_the_job_and_other_groups_go_on(options):
    ranks = Ranks(4)
    try:
        outcomes = ranks.try_run("tests.live.part_groups:lose_a_rank", split=STRIDED, lost=3, **options)
    finally:
        ranks.close()
    assert outcomes[1][1][:2] == ("PeerDied", 3)
    assert "rank 3 is gone" in outcomes[1][1][2]
    assert [outcomes[rank][1][0] for rank in (0, 2)] == ["trained"] * 2
