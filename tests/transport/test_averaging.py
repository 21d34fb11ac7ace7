"""Averages over two real nodes in one process, and how ranks meet without torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from gradlane import policies
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.core.profile import Profile, TensorSpec
from gradlane.errors import CommunicationError, InputError, MismatchError, PeerFailed, PlanError
from gradlane.plugin.averaging import MEASURED, Averaging
from gradlane.plugin.meeting import Meeting
from tests.ports import free_port

pytestmark = pytest.mark.matrix

SPECS = tuple(TensorSpec(name, size) for name, size in [("a", 100_000), ("b", 40), ("c", 3_000), ("d", 20_004)])


def meetings(world: int = 2) -> list[Meeting]:
    port = free_port()
    return [Meeting(rank, world, "127.0.0.1", port) for rank in range(world)]


def on_each(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return or raise, each on a thread of its own."""
    found: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            found[index] = calls[index]()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def two(policy: str | Policy = "mercury", specs: tuple[TensorSpec, ...] = SPECS, **options: Any) -> list[Averaging]:
    return on_each(*[lambda m=m: Averaging(specs, policy, meeting=m, **options) for m in meetings()])


@pytest.fixture
def pair() -> Iterator[list[Averaging]]:
    both = two()
    yield both
    for one in both:
        one.close()


@pytest.mark.parametrize(
    "policy",
    [
        "mercury",
        "mg-wfbp",  # merges
        policies.get("bytescheduler", partition_bytes=4096, credit_bytes=8192),
        policies.get("dear", fusion_bytes=50_000),  # two phases
    ],
    ids=["mercury", "mg-wfbp", "bytescheduler", "dear"],
)
def test_averages_are_those_of_both_ranks_bit_for_bit_before_and_after_the_plan_is_measured(policy: str | Policy) -> None:
    both = two(policy)
    assumed = [tensor.name for tensor in both[0].plan.tensors]
    order = [1, 3, 0, 2]  # another than the assumed
    draw = np.random.default_rng(0)

    def train(rank: int, parts: list[list[np.ndarray]]) -> list[list[bytes]]:
        averages = []
        for of_ranks in parts:
            for tensor in order:
                both[rank].hand_over(tensor, of_ranks[rank][tensor])
            averages.append([average.tobytes() for average in both[rank].take()])
        return averages

    parts = [
        [[draw.standard_normal(spec.size_bytes // 4, np.float32) for spec in SPECS] for _ in range(2)]
        for _ in range(MEASURED + 3)
    ]
    expected = [[((one + other) / 2).tobytes() for one, other in zip(*of_ranks, strict=True)] for of_ranks in parts]
    assert on_each(lambda: train(0, parts), lambda: train(1, parts)) == [expected, expected]
    assert assumed == ["d", "c", "b", "a"]
    assert [tensor.name for tensor in both[1].plan.tensors] == [SPECS[tensor].name for tensor in order]
    timeline = both[0].timeline()
    assert {span.iteration for span in timeline.spans} == {MEASURED + 1, MEASURED + 2}
    assert [len(timeline.of(kind)) for kind in ("ready", "wait")] == [8, 2]
    for one in both:
        one.close()


def test_rank_0s_arrays_are_copied_to_all_bit_for_bit(pair: list[Averaging]) -> None:
    arrays = [np.array([[-0.0, 1.5]]), np.array([], np.float32), np.array(7), np.arange(5, dtype=np.uint32)]
    found = on_each(lambda: pair[0].broadcast(arrays), lambda: pair[1].broadcast([np.zeros_like(one) for one in arrays]))
    for copies in found:
        for copy, array in zip(copies, arrays, strict=True):
            assert (copy.shape, copy.dtype, copy.tobytes()) == (array.shape, array.dtype, array.tobytes())


def test_gradients_that_do_not_fit_are_refused_and_so_is_everything_after() -> None:
    both = two()
    with pytest.raises(InputError, match="c: got a gradient of 3000 bytes of int32, expected 3000 of float32"):
        both[0].hand_over(2, np.zeros(750, np.int32))
    with pytest.raises(InputError, match="c: got a gradient"):
        both[0].take()
    both[1].hand_over(2, np.zeros(750, np.float32))
    with pytest.raises(InputError, match="c: its gradient came twice in iteration 0, expected one average a step"):
        both[1].hand_over(2, np.zeros(750, np.float32))
    for one in both:
        one.close()


def test_averages_that_are_taken_too_early_are_refused(pair: list[Averaging]) -> None:
    pair[0].hand_over(1, np.zeros(10, np.float32))
    with pytest.raises(InputError, match="a: it was not handed over in iteration 0"):
        pair[0].take()


def test_a_rank_that_gives_up_ends_the_wait_of_the_other_with_its_reason() -> None:
    both = two()
    for tensor, spec in enumerate(SPECS):
        both[0].hand_over(tensor, np.zeros(spec.size_bytes // 4, np.float32))

    def gives_up() -> None:
        with both[1]:
            raise ValueError("out of data")

    found = on_each(both[0].take, gives_up)
    assert isinstance(found[0], PeerFailed)
    assert "ValueError: out of data" in str(found[0])
    assert isinstance(found[1], ValueError)
    with pytest.raises(PeerFailed, match="out of data"):
        both[0].hand_over(0, np.zeros(25_000, np.float32))
    with pytest.raises(PeerFailed), both[0]:
        raise RuntimeError("what a framework makes of it")


def test_a_rank_that_gave_up_before_the_other_waits_is_noticed_at_once() -> None:
    both = two(timeout_s=600)
    for tensor, spec in enumerate(SPECS):
        both[0].hand_over(tensor, np.zeros(spec.size_bytes // 4, np.float32))
    both[1].close("out of data")
    with pytest.raises(PeerFailed, match="out of data"):
        both[0]._node.take(60)  # tells of nothing but a failure here
    assert [type(one) for one in on_each(both[0].take)] == [PeerFailed]
    both[0].close()


def test_a_sum_that_does_not_come_is_an_error_that_says_what_is_under_way() -> None:
    both = two(timeout_s=0.2)
    for tensor, spec in enumerate(SPECS):
        both[0].hand_over(tensor, np.zeros(spec.size_bytes // 4, np.float32))
    with pytest.raises(
        CommunicationError, match=r"iteration 0: not all sums came \(.* unfinished.*\) within 0 s; is another rank slow"
    ):
        both[0].take()
    for one in both:
        one.close()


def test_ranks_with_other_tensors_policies_or_networks_are_refused() -> None:
    for other in ({"specs": SPECS[:3]}, {"policy": "p3"}, {"network": Network.line(2, 1, 10**9)}):
        terms = [{"specs": SPECS, "policy": "mercury"}, {"specs": SPECS, "policy": "mercury", **other}]
        found = on_each(
            *[lambda m=m, t=t: Averaging(meeting=m, timeout_s=10, **t) for m, t in zip(meetings(), terms, strict=True)]
        )
        assert all(isinstance(one, MismatchError) for one in found), found


class OfItsOwn:
    """A policy that does not plan the same everywhere."""

    name = "of-its-own"

    def __init__(self) -> None:
        self.times = 0

    def __repr__(self) -> str:
        return "OfItsOwn()"

    def plan(self, profile: Profile, network: Network) -> Plan:
        self.times += 1
        plan = policies.get("p3", slice_bytes=4096 * self.times).plan(profile, network)
        return msgspec.structs.replace(plan, policy=self.name)


def test_ranks_that_plan_differently_from_the_same_profile_are_refused() -> None:
    own, other = OfItsOwn(), OfItsOwn()
    both = on_each(*[lambda m=m, p=p: Averaging(SPECS, p, meeting=m) for m, p in zip(meetings(), (own, other), strict=True)])
    other.times += 1

    def train(rank: int) -> None:
        with both[rank]:
            for _ in range(MEASURED + 2):
                for tensor, spec in enumerate(SPECS):
                    both[rank].hand_over(tensor, np.zeros(spec.size_bytes // 4, np.float32))
                both[rank].take()

    found = on_each(lambda: train(0), lambda: train(1))
    assert isinstance(found[0], PeerFailed)
    assert isinstance(found[1], MismatchError)
    assert "rank 1: it made another plan than rank 0 from the same profile" in str(found[1])


def test_a_plan_of_several_lanes_is_refused() -> None:
    with pytest.raises(PlanError, match="got 2 lanes, expected one"):
        Averaging(SPECS, "geryon", meeting=Meeting(0, 2, "127.0.0.1", 1))


def test_ranks_that_do_not_fit_one_another_do_not_meet() -> None:
    first, second = meetings()
    other_world = Meeting(1, 3, second.host, second.port)
    found = on_each(
        lambda: Averaging(SPECS, meeting=first, timeout_s=1),
        lambda: Averaging(SPECS, meeting=other_world, timeout_s=1),
    )
    assert isinstance(found[0], CommunicationError)
    assert isinstance(found[1], MismatchError)
    assert "ranks disagree on the world size: 2 on rank 0, 3 on rank 1" in str(found[1])
    with pytest.raises(InputError, match=r"rank 0 cannot listen on .* expected a free port of this host, and one rank 0"):
        Averaging(SPECS, meeting=Meeting(0, 4, first.host, first.port))
    with pytest.raises(CommunicationError, match=r"rank 1: no rank 0 at .* within 0 s"):
        Averaging(SPECS, meeting=meetings()[1], timeout_s=0.1)


def test_one_rank_alone_gets_its_own_gradients() -> None:
    with Averaging(SPECS, meeting=meetings(1)[0]) as alone:
        for tensor, spec in enumerate(SPECS):
            alone.hand_over(tensor, np.full(spec.size_bytes // 4, 1.5, np.float32))
        assert all((average.view(np.float32) == 1.5).all() for average in alone.take())


def test_the_meeting_is_read_from_the_variables_that_launchers_set() -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert Meeting.of(given) == Meeting(1, 2, "10.0.0.1", 29500)
    with pytest.raises(InputError, match="RANK: got '', expected a number; set RANK, WORLD_SIZE"):
        Meeting.of({})
    with pytest.raises(InputError, match="rank: got 2 of a world of 2, expected 0 to 1"):
        Meeting.of({**given, "RANK": "2"})
    with pytest.raises(InputError, match="it is of the store of torchrun or gradlane launch"):
        Meeting.of({**given, "TORCHELASTIC_USE_AGENT_STORE": "True"})
