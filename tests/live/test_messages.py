"""Messages between two ranks over gradlane's backend, and what is made of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live.ranks import Ranks
from tests.processes import AT_ONCE_S

pytestmark = pytest.mark.matrix

CASES = "tests.live.messages:"


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("early", [False, True])
def test_messages_arrive_by_source_tag_and_order(ranks: Ranks, early: bool, shared: bool) -> None:
    assert ranks.run(CASES + "all_pairs", early=early, shared=shared) == [True] * ranks.world


def test_messages_of_a_batch_arrive(ranks: Ranks) -> None:
    expected = [[3.0 * (other + 1) for other in range(ranks.world) if other != rank] for rank in range(ranks.world)]
    assert ranks.run(CASES + "batched") == expected


def test_a_receive_from_anyone_names_the_sender(ranks: Ranks) -> None:
    heard, *_ = ranks.run(CASES + "any_source")
    others = list(range(1, ranks.world))
    assert [sorted(heard[: len(others)]), sorted(heard[len(others) :])] == [others, others]


def test_strided_and_complex_tensors_travel(ranks: Ranks) -> None:
    assert ranks.run(CASES + "odd_tensors")[1] == [1.0, 0.0, 5.0, 0.0, 9.0, 0.0, 1.0, 2.0, 1.0, -2.0, -7.0, -8.0]


def test_a_flood_is_held_back_and_holds_up_no_sum(ranks: Ranks) -> None:
    assert [right for _, right in ranks.run(CASES + "flood")] == [True] * ranks.world


def test_a_call_that_cannot_be_is_refused_and_does_no_harm(ranks: Ranks) -> None:
    assert ranks.run(CASES + "refused") == [["InputError"] * 5] * ranks.world


@pytest.mark.parametrize("what", ["size", "large size"])
def test_another_size_ends_the_group_for_all(ranks: Ranks, what: str) -> None:
    ends = ranks.run(CASES + "fails", what=what)
    assert {kind for kind, _ in ends} == {"MismatchError"}, ends
    assert max(seconds for _, seconds in ends) < AT_ONCE_S


def test_a_wait_for_one_that_never_sends_ends_in_time(ranks: Ranks) -> None:
    (first, seconds), *others = ranks.run(CASES + "fails", what="late")
    assert (first, {kind for kind, _ in others}) == ("CommunicationError", {"PeerFailed"})
    assert seconds < AT_ONCE_S


def test_a_wait_for_one_that_has_left_ends(two_ranks: Ranks) -> None:
    (kind, seconds), _ = two_ranks.run(CASES + "fails", what="left")
    assert kind == "PeerDied"
    assert seconds < AT_ONCE_S


def test_a_wait_for_one_that_died_ends_at_once() -> None:
    ranks = Ranks(2)
    try:
        (ok, (kind, seconds)), _ = ranks.try_run(CASES + "fails", what="died")
    finally:
        ranks.close()
    assert (ok, kind) == (True, "PeerDied")
    assert seconds < AT_ONCE_S


def test_a_monitored_barrier_names_who_is_missing(ranks: Ranks) -> None:
    first, *others, _ = ranks.run(CASES + "barriers")
    assert first == ("BarrierError", (ranks.world - 1,))
    assert set(others) <= {("BarrierError", ())}


def test_sparse_tensors_are_summed(ranks: Ranks) -> None:
    expected = [[0.0, 0.0] for _ in range(4)]
    for rank in range(1, ranks.world):
        for place in (0, rank, rank):
            expected[place] = [entry + 1 for entry in expected[place]]
    assert ranks.run(CASES + "sparse") == [expected] * ranks.world


@pytest.mark.parametrize("what", ["join", "powersgd"])
def test_ddp_trains_to_the_same_bits_as_over_gloo(two_ranks: Ranks, what: str) -> None:
    ours, glooish = (two_ranks.run(CASES + "ddp", backend=backend, what=what) for backend in ("gradlane", "gloo"))
    assert ours == glooish
    assert ours[0] == ours[1]


def test_profilers_see_what_was_called(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(CASES + "profiled")
    assert first["gradlane:send"] == second["gradlane:recv"] == 1
    assert first["gradlane:all_reduce"] >= 1
