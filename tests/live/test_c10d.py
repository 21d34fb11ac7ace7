"""Every collective of torch.distributed over gradlane's backend gives what NumPy gives, and every fault an error in time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradlane.errors import InputError
from gradlane.live import c10d
from gradlane.schedule.wire_order import WireOrder
from tests.live.ranks import Ranks
from tests.processes import AT_ONCE_S

pytestmark = pytest.mark.matrix

CASES = "tests.live.collectives:"
NUMBERS = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool"]
OPS = ["SUM", "AVG", "MIN", "MAX", "PRODUCT"]
REDUCING = ["all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"]
MOVING = ["broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "all_to_all", "all_to_all_single"]
# the last has memory with other values than its own
LAYOUTS = ["plain", "transposed", "strided", "negative"]

shapes = st.one_of(
    st.sampled_from([(0,), (1,), (5, 0), (3,), (64, 3), (1023,), (1025,), (33, 65), (70_001,), (3, 5, 7), (300_000,)]),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
relaxed = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("op", OPS)
def test_a_reduction_is_the_oracles(ranks: Ranks, op: str, dtype: str) -> None:
    if dtype == "bool" and op == "AVG":
        pytest.skip("a mean of truth values is refused")

    @relaxed
    @given(st.sampled_from(REDUCING), shapes, st.sampled_from(LAYOUTS), st.data())
    def holds(what: str, shape: tuple[int, ...], layout: str, data: st.DataObject) -> None:
        root = data.draw(st.integers(0, ranks.world - 1))
        ranks.run(
            CASES + "check",
            what=what,
            op=op,
            dtype=dtype,
            shape=shape,
            layout=layout,
            root=root,
            seed=data.draw(st.integers(0, 99)),
        )

    holds()


@pytest.mark.parametrize("what", MOVING)
def test_what_moves_arrives(ranks: Ranks, what: str) -> None:
    @relaxed
    @given(st.sampled_from([*NUMBERS, "int16", "complex64"]), shapes, st.sampled_from([*LAYOUTS, "conjugate"]), st.data())
    def holds(dtype: str, shape: tuple[int, ...], layout: str, data: st.DataObject) -> None:
        root = data.draw(st.integers(0, ranks.world - 1))
        ranks.run(
            CASES + "check",
            what=what,
            op="SUM",
            dtype=dtype,
            shape=shape,
            layout=layout,
            root=root,
            seed=data.draw(st.integers(0, 99)),
        )

    holds()


@pytest.mark.parametrize("layout", ["negative", "conjugate"])
@pytest.mark.parametrize("what", MOVING)
def test_what_moves_between_views_has_their_values(ranks: Ranks, what: str, layout: str) -> None:
    ranks.run(CASES + "check", what=what, op="SUM", dtype="complex64", shape=(5, 3), layout=layout, root=1, seed=1)


def test_each_tensor_of_one_call_is_reduced_as_its_own_dtype_asks(ranks: Ranks) -> None:
    world, total = ranks.world, sum(range(ranks.world))
    mean = int(total / world)  # towards zero
    summed, averaged = [world + total, world / 4], [(world + total) / world, 0.25]
    for ends in ranks.run(CASES + "mixed"):
        assert ends == [
            [[True], summed],
            [summed, [True]],
            [[True], [world - 1, -3], [world, 0.25]],
            [[mean, -3], averaged],
            [averaged, [mean, -3]],
            [],
        ]


def test_ranks_may_get_other_dtypes_than_others_from_one_reduce_scatter(ranks: Ranks) -> None:
    total = 1.5 * ranks.world + sum(range(ranks.world))
    assert ranks.run(CASES + "mixed_scatters") == [[True] if rank % 2 else [total] for rank in range(ranks.world)]


def test_what_a_rank_sends_to_itself_may_be_another_view_of_where_it_goes(ranks: Ranks) -> None:
    plain, negative, conjugate, turned = ranks.run(CASES + "own_part")[0]
    assert plain == [1, 2, 3, 0, 4, 0, 0, 5]
    assert negative == [-each for each in plain]
    assert conjugate == [1, -2, 3, 0, 4, 0, 0, -5]
    assert turned == [1, 2, 4, 0, 3, 0, 0, 5]


def test_objects_travel(ranks: Ranks) -> None:
    for gathered, told in ranks.run(CASES + "objects"):
        assert gathered == [{"rank": each, "text": "x" * each} for each in range(ranks.world)]
        assert told == ["from 0", 0]


def test_a_rank_may_be_ahead_of_the_others(ranks: Ranks) -> None:
    total = ranks.world * (ranks.world + 1) / 2
    assert ranks.run(CASES + "ahead") == [[total, total, 1.0, total, 1.0]] * ranks.world


def test_memory_stays_until_its_sum_is_there_though_nobody_waits(ranks: Ranks) -> None:
    assert ranks.run(CASES + "dropped", times=300) == [4.0 * ranks.world] * ranks.world


@pytest.mark.parametrize(("order", "expected"), [("fifo", [3, 1, 4, 0, 2, 5]), ("lifo", [3, 1, 4, 5, 2, 0])])
def test_calls_with_a_level_go_before_all_that_have_none(order: Literal["fifo", "lifo"], expected: list[int]) -> None:
    options, connection = c10d.Options(order=order), WireOrder("packet-priority")
    for number, level in enumerate([None, 5, None, 0, 5, None]):
        connection.enqueue(options.priority_of(level, number), 1)
    assert [connection.take()[0] for _ in expected] == expected


def test_how_long_a_rank_may_be_silent_comes_from_the_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADLANE_STALL_TIMEOUT", raising=False)
    assert c10d.Options().stall_timeout == 60
    monkeypatch.setenv("GRADLANE_STALL_TIMEOUT", "7.5")
    assert (c10d.Options().stall_timeout, c10d.Options(stall_timeout=3).stall_timeout) == (7.5, 3)
    assert c10d.Options().fingerprint() != c10d.Options(stall_timeout=3).fingerprint()
    for wrong in ("", "soon", "0.5", "nan", "1e9"):
        monkeypatch.setenv("GRADLANE_STALL_TIMEOUT", wrong)
        with pytest.raises(InputError, match="GRADLANE_STALL_TIMEOUT: got"):
            c10d.Options()
        with pytest.raises(InputError, match="stall_timeout: got 0"):
            c10d.Options(stall_timeout=0)


@pytest.mark.parametrize("order", ["fifo", "lifo"])
def test_priorities_change_the_order_and_nothing_else(ranks: Ranks, order: str) -> None:
    world, base = ranks.world, sum(range(ranks.world))
    assert ranks.run(CASES + "urgent", order=order) == [[float(base + world * each) for each in [*range(8), 0]]] * world


def test_futures_resolve(ranks: Ranks) -> None:
    world, base = ranks.world, sum(range(ranks.world))
    assert ranks.run(CASES + "futures") == [([float(base + world * each) for each in range(5)], True)] * world


@pytest.mark.parametrize("what", ["size", "small size", "type", "op", "parts", "call"])
def test_ranks_that_disagree_are_told_and_sum_nothing(ranks: Ranks, what: str) -> None:
    ends = ranks.run(CASES + "disagree", what=what)
    assert {kind for kind, _, _ in ends} == {"MismatchError"}, ends
    assert max(seconds for _, _, seconds in ends) < AT_ONCE_S


def test_a_wait_ends_and_ends_the_group_for_all(ranks: Ranks) -> None:
    first, *others = ranks.run(CASES + "disagree", what="nothing")
    assert first[0] == "CommunicationError"
    assert first[2] < AT_ONCE_S
    assert {(kind, "Timed out waiting" in text) for kind, text, _ in others} == {("PeerFailed", True)}


@pytest.mark.parametrize("shared", [True, False])
def test_an_all_to_all_takes_one_id(ranks: Ranks, shared: bool) -> None:
    assert ranks.run(CASES + "ids", shared=shared) == [10] * ranks.world


@pytest.mark.parametrize("shared", [True, False])
def test_a_tensor_stays_as_it_is_once_a_wait_for_it_has_raised(two_ranks: Ranks, shared: bool) -> None:
    assert two_ranks.run(CASES + "late", shared=shared) == [0, 0]


def test_an_abort_ends_the_group_for_all(ranks: Ranks) -> None:
    first, *others = ranks.run(CASES + "disagree", what="abort")
    assert first[:2] == ("CommunicationError", "the process group is closed")
    for kind, text, _ in others:  # from rank 0, or from a rank that heard it first
        assert kind == "PeerFailed"
        assert re.fullmatch(r"transport: (rank \d says: )*rank 0 aborted the process group", text), text


def test_what_is_not_built_is_refused_and_does_no_harm(ranks: Ranks) -> None:
    expected = ["UnsupportedError", "UnsupportedError", "InputError", "InputError"]
    first, second, *_ = ranks.run(CASES + "refused")
    assert first == second == expected


def test_groups_leave_nothing_behind(ranks: Ranks) -> None:
    assert ranks.run(CASES + "residue") == [(0, 0, 0)] * ranks.world


def test_a_group_of_some_ranks(ranks: Ranks) -> None:
    ends = ranks.run(CASES + "parts")
    assert ends[-2:] == [2.0 * ranks.world - 3] * 2


def test_ddp_trains_to_the_same_bits_as_over_gloo(two_ranks: Ranks) -> None:
    assert two_ranks.run(CASES + "trained", backend="gradlane") == two_ranks.run(CASES + "trained", backend="gloo")


@pytest.mark.parametrize("world", [2, 3])
def test_a_dead_rank_is_named_at_once(world: int) -> None:
    ranks = Ranks(world)
    try:
        ends = ranks.try_run(CASES + "die")
    finally:
        ranks.close()
    assert ends[0] == (False, ("ProcessEnded", "exit code 7", ""))
    for ok, (kind, rank, seconds) in ends[1:]:
        assert ok
        assert (kind, rank) == ("PeerDied", 0)
        assert seconds < AT_ONCE_S


def test_the_default_group_may_be_gradlanes(ranks: Ranks) -> None:
    own = Ranks(ranks.world)
    try:
        assert own.run(CASES + "whole_job") == [[float(ranks.world), 5.0]] * ranks.world
    finally:
        own.close()
