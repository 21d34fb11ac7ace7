"""Ranks of one host sum and send messages through shared memory: the bits of loopback, and the same ends of a rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from gradlane.errors import InputError
from gradlane.live import c10d
from tests.commands import gradlane
from tests.live.ranks import Ranks
from tests.processes import AT_ONCE_S

pytestmark = pytest.mark.matrix

CASES = "tests.live.shared:"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int64"])
def test_the_bits_are_those_of_rank_order_over_loopback(ranks: Ranks, dtype: str, op: str) -> None:
    assert ranks.run(CASES + "both", dtype=dtype, op=op, sizes=[0, 1, 77, 65_537, 1_500_001]) == [True] * 3


def test_gradients_do_not_cross_a_socket(ranks: Ranks) -> None:
    assert max(ranks.run(CASES + "carried", shared=True)) < 10_000
    assert min(ranks.run(CASES + "carried", shared=False)) > 4_000_000


def test_messages_do_not_cross_a_socket(ranks: Ranks) -> None:
    assert max(ranks.run(CASES + "exchanged", shared=True)) < 10_000
    assert min(ranks.run(CASES + "exchanged", shared=False)) > 4_000_000


def test_emulated_hosts_share_no_memory() -> None:
    done = gradlane(
        "lab", "--hosts", 2, "--link", "1gbit", "--quiet", "--", sys.executable, "-m", "tests.live.shared", timeout=60
    )
    assert min(map(int, done.stdout.split())) >= 4_000_000


@pytest.mark.parametrize("what", ["sums", "messages"])
@pytest.mark.parametrize(("how", "expected"), [("killed", "PeerDied"), ("stopped", "PeerStalled")])
def test_a_rank_that_is_gone_is_named_as_over_loopback_and_leaves_nothing(how: str, expected: str, what: str) -> None:
    ranks = Ranks(3)
    try:
        *others, last = ranks.answers(CASES + "silent", 30, lambda _: None if how == "killed" else 2.0, how=how, what=what)
        for answer in others:
            assert answer is not None
            ok, (kind, rank, seconds) = answer
            assert ok
            assert (kind, rank) == (expected, 2)
            assert seconds < (2.5 if how == "killed" else 2 * AT_ONCE_S)
        assert last is None or not last[0]
    finally:
        ranks.processes[2].kill()  # a stopped one cannot end by itself
        ranks.close()
    assert not ranks.left_over()


@pytest.mark.parametrize("shared", [True, False])
def test_a_rank_that_pauses_as_a_migrating_host_does_is_waited_for(two_ranks: Ranks, shared: bool) -> None:
    assert two_ranks.run(CASES + "paused", pause_s=4.0, shared=shared) == [(True, True)] * 2


def test_memory_that_cannot_be_had_is_told_to_all_before_the_first_sum(two_ranks: Ranks) -> None:
    for kind, text in two_ranks.run(CASES + "limited"):
        assert kind == "CapacityError", text
        assert "rank 0: " in text
        assert "bytes of shared memory" in text
        assert "GRADLANE_SHARED_MEMORY=0" in text


def test_ranks_that_differ_in_the_option_are_told(ranks: Ranks) -> None:
    kinds = {kind for kind, _ in ranks.run(CASES + "mixed")}
    assert "MismatchError" in kinds
    assert "" not in kinds  # whoever agrees with the others hears that they have ended


def test_the_environment_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert c10d.Options().shared_memory
    monkeypatch.setenv("GRADLANE_SHARED_MEMORY", "0")
    assert not c10d.Options().shared_memory
    assert c10d.Options(shared_memory=True).shared_memory
    monkeypatch.setenv("GRADLANE_SHARED_MEMORY", "no")
    with pytest.raises(InputError, match="expected 0 or 1"):
        c10d.Options()
