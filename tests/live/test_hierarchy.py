"""Sums over torch.distributed within hosts first: what every backend promises, the bits, the measuring, the ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec import UNSET

from gradlane.core import files
from gradlane.core.network import Network
from gradlane.live.backends.hierarchy import PIECE_BYTES, Hosts, levels_of
from tests.live.ranks import Ranks

pytestmark = pytest.mark.matrix

CASES = "tests.live.hierarchy:"
BE_ON = "tests.live.host_sums:be_on"
TWO = [0, 1, 0, 1]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    ranks.run(BE_ON, hosts=TWO)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(("weight", "dtype"), [(1, "float32"), (2, "float64"), (1, "bfloat16")])
def test_it_is_a_backend(ranks: Ranks, weight: int, dtype: str) -> None:
    ranks.run(CASES + "check", weight=weight, dtype=dtype)


@pytest.mark.parametrize("policy", ["ddp", "bytescheduler", "dear"])
def test_a_session_gives_all_ranks_the_same_bits_and_ddps_numbers(ranks: Ranks, policy: str) -> None:
    digests, apart = zip(*ranks.run(CASES + "trained", policy=policy), strict=True)
    assert len(set(digests)) == 1
    assert max(apart) < 1e-5


def test_both_levels_are_measured_alike_on_all_ranks(ranks: Ranks) -> None:
    first, *others = ranks.run(CASES + "measured", algorithm="hierarchical")
    assert others == [first] * 3
    network = files.loads(first["network"].encode(), Network)
    assert network.bus is not UNSET
    assert (network.workers, network.hosts, network.bus.devices, network.bus.packet_bytes) == (4, 2, 2, PIECE_BYTES)
    assert network.cost_ns(1 << 22) > network.between.cost_ns(1 << 22)


def test_the_choice_is_the_same_on_all_ranks_and_its_network_is_returned(ranks: Ranks) -> None:
    first, *others = ranks.run(CASES + "measured", algorithm=None)
    assert others == [first] * 3
    network = files.loads(first["network"].encode(), Network)
    assert (network.bus is not UNSET) == first["is_hierarchical"]


def test_hosts_of_unequal_numbers_are_refused_by_name_and_else_sum_flat(ranks: Ranks) -> None:
    ranks.run(BE_ON, hosts=[0, 0, 0, 1])
    try:
        for said in ranks.run(CASES + "refused"):
            assert "algorithm: got 'hierarchical' for 4 ranks" in said
            assert "[0, 0, 0, 1]" in said
        assert not any(each["is_hierarchical"] for each in ranks.run(CASES + "measured", algorithm=None))
    finally:
        ranks.run(BE_ON, hosts=TWO)


@pytest.mark.parametrize("culprit", [1, 2])
def test_a_rank_that_is_killed_is_named_on_both_hosts(culprit: int) -> None:
    ranks = Ranks(4)
    try:
        ranks.run(BE_ON, hosts=TWO)
        answers = ranks.try_run(CASES + "dies", culprit=culprit)
        assert not answers.pop(culprit)[0]
        for ok, answer in answers:
            assert ok, answer
            assert tuple(answer[:2]) == ("PeerDied", culprit)
            assert answer[2] < 2.5
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([0, 1, 0, 1], Hosts((0, 2), (0, 1))),
        ([0, 0, 0, 1, 1, 1], Hosts((0, 1, 2), (0, 3))),
        ([0, 1, 2], None),
        ([0, 0, 0], None),
        ([0, 0, 1], None),
        ([0], None),
    ],
)
def test_ranks_at_one_place_of_their_hosts_are_peers(hosts: list[int], expected: Hosts | None) -> None:
    assert levels_of(hosts, 0) == expected
