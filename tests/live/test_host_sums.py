"""Hosts of several ranks sum in their memory first: what NumPy gives, once over the network, and the same ends as ever."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from gradlane import lab
from tests.commands import gradlane
from tests.live.ranks import Ranks

pytestmark = pytest.mark.matrix

CASES = "tests.live.host_sums:"
TWO = [0, 0, 1, 1]
SIZES = [0, 1, 77, 4097, 65_537, 1_500_001]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    ranks.run(CASES + "be_on", hosts=TWO)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("what", "dtype", "op"),
    [
        ("all_reduce", "float32", "SUM"),
        ("all_reduce", "bfloat16", "AVG"),
        ("all_reduce_coalesced", "int64", "MAX"),
        ("reduce", "float64", "SUM"),
        ("reduce_scatter", "float32", "PRODUCT"),
        ("reduce_scatter_tensor", "bool", "SUM"),
        ("broadcast", "int16", "SUM"),
        ("all_gather", "uint8", "SUM"),
        ("all_gather_into_tensor", "float32", "SUM"),
        ("all_to_all", "float32", "SUM"),
    ],
)
@pytest.mark.parametrize("shape", [(), (5, 0), (1025,), (33, 65), (700_001,)])
def test_a_collective_is_the_oracles(ranks: Ranks, what: str, dtype: str, op: str, shape: tuple[int, ...]) -> None:
    root = sum(shape) % 4
    ranks.run(CASES + "check", what=what, op=op, dtype=dtype, shape=shape, layout="plain", root=root, seed=len(what))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_all_ranks_have_the_same_bits(ranks: Ranks, dtype: str) -> None:
    first, *others = ranks.run(CASES + "sums", dtype=dtype, sizes=SIZES)
    assert others == [first] * 3


def test_rank_order_gives_the_bits_of_one_host_and_of_four(ranks: Ranks) -> None:
    found = []
    for hosts in (TWO, [0] * 4, [0, 1, 2, 3]):
        ranks.run(CASES + "be_on", hosts=hosts)
        found += ranks.run(CASES + "sums", dtype="float32", sizes=SIZES, rank_order=True)
    ranks.run(CASES + "be_on", hosts=TWO)
    assert found == [found[0]] * 12


@pytest.mark.parametrize(
    ("what", "least"), [("all_reduce", 4_000_000), ("reduce_scatter", 2_000_000), ("all_gather", 2_000_000)]
)
def test_a_host_sends_what_one_rank_would(ranks: Ranks, what: str, least: int) -> None:
    sent = ranks.run(CASES + "sent", what=what)
    for host in (sent[:2], sent[2:]):
        assert least <= sum(host) < 1.01 * least


def test_a_broadcast_crosses_once(ranks: Ranks) -> None:
    sent = ranks.run(CASES + "sent", what="broadcast")
    assert 4_000_000 <= sum(sent[2:]) < 4_040_000
    assert sum(sent[:2]) < 2_020_000  # of servers there that pass their share on


def test_hosts_of_unequal_numbers_sum_as_ever(ranks: Ranks) -> None:
    ranks.run(CASES + "be_on", hosts=[0, 0, 0, 1])
    first, *others = ranks.run(CASES + "sums", dtype="int32", sizes=SIZES)
    ranks.run(CASES + "be_on", hosts=TWO)
    assert [first, *others] == ranks.run(CASES + "sums", dtype="int32", sizes=SIZES)


@pytest.mark.parametrize("policy", ["ddp", "bytescheduler"])
def test_a_session_over_it_gives_the_bits_of_ddp_over_it(ranks: Ranks, policy: str) -> None:
    assert ranks.run(CASES + "session", policy=policy) == [[]] * 4


@pytest.mark.parametrize("sizes", [[800_000, 800_000, 600_000, 600_000], [800_000, 600_000, 800_000, 600_000]])
def test_pieces_of_tensors_that_differ_in_size_are_not_summed(ranks: Ranks, sizes: list[int]) -> None:
    assert set(ranks.run(CASES + "differs", sizes=sizes)) == {"MismatchError"}


def test_memory_that_one_host_lacks_is_told_to_all_before_the_first_sum(ranks: Ranks) -> None:
    for kind, text in ranks.run(CASES + "limited"):
        assert kind == "CapacityError", text
        assert "rank 2: " in text
        assert "GRADLANE_SHARED_MEMORY=0" in text


POLICIES = [
    "wfbp",
    "ddp",
    ("bytescheduler", {"partition_bytes": 400_000, "credit_bytes": 500_000}),
    ("dear", {"fusion_bytes": 500_000}),
    "mercury",
    "owners",
]
GRADIENT_BYTES = 4 * (65 * 6000 + 6001 * 64 + 65 * 16)


@pytest.mark.parametrize(
    ("hosts", "levels"),
    [
        (TWO, ("memory", "network")),
        ([0, 1, 0, 1], ("memory", "network")),
        ([0] * 4, ("memory",)),
        ([0, 0, 0, 1], ("network",)),
    ],
)
def test_sessions_end_alike_and_as_ddp_but_for_rounding(ranks: Ranks, hosts: list[int], levels: tuple[str, ...]) -> None:
    ranks.run(CASES + "be_on", hosts=hosts)
    outcomes = ranks.run(CASES + "sessions", policies=POLICIES)
    ranks.run(CASES + "be_on", hosts=TWO)
    for policy in map(str, POLICIES):
        digests, far, passed, sent = zip(*(outcome[policy] for outcome in outcomes), strict=True)
        assert set(digests) == {digests[0]}, policy
        assert far == ([],) * 4, policy
        assert passed == (levels,) * 4
        if levels == ("memory",):
            assert max(sent) < 20_000
        elif levels == ("memory", "network"):
            for host in set(hosts):  # as one rank would send
                assert sum(sent[rank] for rank in range(4) if hosts[rank] == host) < 1.03 * GRADIENT_BYTES, policy


def test_sessions_in_rank_order_have_the_same_bits_wherever_the_ranks_are(ranks: Ranks) -> None:
    digests = set()
    for hosts in (TWO, [0] * 4, [0, 1, 2, 3]):
        ranks.run(CASES + "be_on", hosts=hosts)
        for outcome in ranks.run(CASES + "sessions", policies=["mercury"], summation_order="rank"):
            digests.add(outcome["mercury"][0])
    ranks.run(CASES + "be_on", hosts=TWO)
    assert len(digests) == 1


@pytest.mark.parametrize("options", [{"wire_dtype": "bfloat16"}, {"verify": True}, {"weight": 2}])
def test_sessions_of_two_hosts_take_all_options(ranks: Ranks, options: dict[str, Any]) -> None:
    first, *others = ranks.run(CASES + "sessions", policies=["mercury"], **options)
    assert [outcome["mercury"][0] for outcome in others] == [first["mercury"][0]] * 3
    assert first["mercury"][2] == ("memory", "network")
    assert first["mercury"][1] == [] or "wire_dtype" in options


@pytest.mark.parametrize("options", [{"backend": "server"}, {}])
def test_memory_that_one_host_lacks_is_told_to_all_before_the_first_step(ranks: Ranks, options: dict[str, Any]) -> None:
    for kind, text in ranks.run(CASES + "session_limited", **options):
        assert kind == "CapacityError", text
        assert "rank 2: " in text
        assert "GRADLANE_SHARED_MEMORY=0" in text


@pytest.mark.parametrize("hosts", [TWO, [0] * 4])
@pytest.mark.parametrize(("how", "expected", "soon_s"), [("killed", "PeerDied", 2.5), ("stopped", "PeerStalled", 3.5)])
def test_a_rank_of_a_session_that_ends_in_mid_sum_is_named_and_nothing_is_half_summed(
    how: str, expected: str, soon_s: float, hosts: list[int]
) -> None:
    ranks = Ranks(4)
    try:
        ranks.run(CASES + "be_on", hosts=hosts)
        answers = ranks.answers(CASES + "session_ends", 30, lambda _: None if how == "killed" else 2.0, culprit=1, how=how)
        answers.pop(1)
        for answer in answers:
            assert answer is not None
            ok, (kind, rank, seconds, is_whole) = answer
            assert ok
            assert (kind, rank, is_whole) == (expected, 1, True)
            assert seconds < soon_s
    finally:
        ranks.processes[1].kill()  # a stopped one cannot end by itself
        ranks.close()
    assert not ranks.left_over()


@pytest.mark.parametrize("culprit", [1, 2])
def test_a_rank_that_is_killed_is_named_on_both_hosts_and_leaves_nothing(culprit: int) -> None:
    ranks = Ranks(4)
    try:
        ranks.run(CASES + "be_on", hosts=TWO)
        answers = ranks.try_run(CASES + "dies", culprit=culprit)
        assert not answers.pop(culprit)[0]
        for ok, (kind, rank, seconds) in answers:
            assert ok
            assert (kind, rank) == ("PeerDied", culprit)
            assert seconds < 2.5
    finally:
        ranks.close()
    assert not ranks.left_over()


def test_emulated_hosts_of_two_ranks_share_what_is_theirs() -> None:
    if reason := lab.supported():
        pytest.skip(reason)
    done = gradlane(
        "lab", "--hosts", 2, "--ranks-per-host", 2, "--link", "1gbit", "--quiet", "--",
        sys.executable, "-m", "tests.live.host_sums", timeout=120,
    )  # fmt: skip
    for sent in map(int, done.stdout.split()):
        assert 4_000_000 <= sent < 4_040_000
