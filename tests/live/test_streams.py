"""Devices with streams: what is on them is used only once it is there, whatever they do early or late."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from queue import SimpleQueue

import pytest
import torch
from torch import nn

from gradlane.live.backends.gradient_buffers import GradientBuffers
from gradlane.live.backends.staging import Staging
from gradlane.live.backends.streams import DeviceStreams, Event
from gradlane.testing.streams import CheckedStream, CheckedStreams
from tests.live.ranks import Ranks

pytestmark = pytest.mark.matrix

POLICIES = {
    "all-reduce": ["wfbp", ["bytescheduler", {"partition_bytes": 1000, "credit_bytes": 3000}], "mg-wfbp", "geryon", "dear"],
    "all-reduce in streams": ["wfbp", ["bytescheduler", {"partition_bytes": 1000, "credit_bytes": 3000}], "mg-wfbp", "dear"],
    "server": ["wfbp", ["bytescheduler", {"partition_bytes": 1000, "credit_bytes": 3000}], "mercury", "geryon"],
}


@pytest.mark.parametrize("late", [False, True], ids=["early streams", "late streams"])
@pytest.mark.parametrize("backend", POLICIES)
def test_a_device_with_streams_gives_the_bits_of_ddp(two_ranks, backend, late):
    found = two_ranks.run(
        "tests.live.cases:equals_ddp_with_streams",
        late=late,
        orders="streams" in backend,
        model="convolutions",
        optimizer="sgd",
        policies=POLICIES[backend],
        steps=12,
        backend=backend.split()[0],
    )
    assert found == [{str(policy): [] for policy in POLICIES[backend]}] * 2


@pytest.mark.parametrize("backend", POLICIES)
def test_the_host_waits_for_the_device_once_when_all_is_measured(two_ranks, backend):
    case = {"backend": backend.split()[0], "orders": "streams" in backend}
    for _, waits in two_ranks.run("tests.live.cases:waits_for_the_device", **case):
        assert waits == [0, 0, 0, 1, 0, 0, 0, 0]  # iterations 1 and 2 are measured


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("policy", POLICIES["server"])
def test_two_ranks_on_one_cuda_device_give_the_bits_of_ddp_over_servers(two_ranks, policy):
    found = two_ranks.run(
        "tests.live.cases:equals_ddp",
        model="convolutions",
        optimizer="sgd",
        policies=[policy],
        steps=12,
        backend="server",
        device="cuda",
    )
    assert found == [{str(policy): []}] * 2


@pytest.mark.parametrize("late", [False, True], ids=["early streams", "late streams"])
@pytest.mark.parametrize(("backend", "orders"), [("server", False), ("all-reduce", False), ("all-reduce", True)])
def test_a_model_that_uses_parameters_on_several_streams_gives_the_bits_of_ddp(two_ranks, late, backend, orders):
    case = {"model": "two streams", "late": late, "backend": backend, "orders": orders}
    assert two_ranks.run("tests.live.ordered:trains", **case) == [([], "")] * 2


@pytest.mark.parametrize("late", [False, True], ids=["early streams", "late streams"])
@pytest.mark.parametrize(
    ("fault", "backend", "orders"),
    [
        ("a copy down, or a sum, does not wait for the gradient", "server", False),
        ("a copy down, or a sum, does not wait for the gradient", "all-reduce", True),
        ("nobody waits for a copy up, or a sum", "server", False),
        ("nobody waits for a copy up, or a sum", "all-reduce", True),
        ("the host does not wait for a copy down", "server", False),
        ("of sums that are used together only the first is waited for", "server", False),
        ("updates run on the stream on which a parameter is used", "server", False),
    ],
)
def test_a_wait_that_is_left_out_is_found(two_ranks, late, fault, backend, orders):
    case = {"model": "two streams", "late": late, "backend": backend, "orders": orders, "fault": fault}
    for _, race in two_ranks.run("tests.live.ordered:trains", **case):
        assert "uses of memory are not ordered" in race


@pytest.mark.parametrize("backend", ["server", "all-reduce"])
def test_a_thread_that_has_waited_for_a_sum_brings_up_none_of_the_next_iteration(two_ranks, backend):
    assert two_ranks.run("tests.live.ordered:is_read_by_a_slow_thread", backend=backend) == [([], True, "")] * 2


def test_torch_chooses_kernels_as_for_ordinary_tensors(two_ranks):
    assert two_ranks.run("tests.live.cases:classes_that_choose_kernels") == [({"Parameter"}, [True] * 6)] * 2


def test_a_plan_with_several_lanes_is_refused_where_sums_take_their_turn_in_a_stream(two_ranks):
    for ok, (kind, text, _) in two_ranks.try_run(
        "tests.live.cases:equals_ddp_with_streams",
        late=False,
        orders=True,
        model="convolutions",
        optimizer="sgd",
        policies=["geryon"],
    ):
        assert (ok, kind) == (False, "PlanError")
        assert "plan geryon: it has 2 lanes" in text


@pytest.mark.parametrize("launching", [False, True], ids=["in the backward pass", "in a launch"])
def test_a_failure_of_another_rank_is_heard_where_sums_are_in_a_stream(launching):
    ranks = Ranks(2)
    try:
        here, there = ranks.run("tests.live.ordered:fails_meanwhile", launching=launching)
    finally:
        ranks.kill()
        ranks.close()
    assert there == "ValueError: as it was told to"
    assert here.startswith("PeerFailed: rank 1 failed: ValueError")


def test_a_session_that_failed_as_it_began_leaves_no_thread():
    ranks = Ranks(2)
    try:
        assert ranks.run("tests.live.ordered:attaches_in_vain") == [0, 0]
    finally:
        ranks.kill()
        ranks.close()


@pytest.mark.parametrize(("backend", "orders"), [("server", False), ("all-reduce", True)])
def test_a_plan_that_changes_takes_no_sums_from_memory_without_any(two_ranks, backend, orders):
    assert two_ranks.run("tests.live.ordered:shares_a_gradient", backend=backend, orders=orders) == [True, True]


def test_sums_that_are_stuck_in_a_stream_are_ended_when_the_job_fails_and_known_to_be_lost(two_ranks):
    assert two_ranks.run("tests.live.cases:loses_what_is_stuck") == [([True, True], frozenset({1}), [])] * 2


def staged(late: bool = True) -> tuple[Staging, GradientBuffers]:
    """Slots of three tensors, as if on a device, with what this rank produced in them."""
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, dtype=torch.float64))]
    slots = GradientBuffers(params)
    staging = Staging(CheckedStreams(late))
    staging.take_up(params, slots)
    staging.begin()
    for tensor, slot in enumerate(slots.slots):
        slot.fill_(tensor + 1)
    return staging, slots


def test_gradients_come_down_and_sums_go_up_when_somebody_waits_and_not_before():
    staging, slots = staged()
    told: SimpleQueue[BaseException | None] = SimpleQueue()
    try:
        staging.bring_down([0, 1], told.put)
        staging.bring_down([2], told.put)
        assert [told.get(timeout=10), told.get(timeout=10)] == [None, None]
        assert [slot.tolist() for slot in staging.mirror.slots] == [[1.0, 1.0], [2.0], [3.0]]
        for slot in staging.mirror.slots:
            slot.mul_(10)
        assert [slot.tolist() for slot in slots.slots] == [[1.0, 1.0], [2.0], [3.0]]
        staging.bring_up([0, 2])
        assert [slot.tolist() for slot in slots.slots] == [[10.0, 10.0], [2.0], [30.0]]
        staging.bring_up([0, 1, 2])
        assert [slot.tolist() for slot in slots.slots] == [[10.0, 10.0], [20.0], [30.0]]
    finally:
        staging.close()


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_copy_down_waits_for_the_copy_up_of_the_iteration_before(is_waited_for):
    streams = CheckedStreams(late=True)
    with streams.watching() if is_waited_for else pytest.raises(AssertionError, match="not ordered"):
        params = [nn.Parameter(torch.zeros(2))]
        staging = Staging(streams)
        try:
            with contextlib.nullcontext() if is_waited_for else streams.watching():
                staging.take_up(params, GradientBuffers(params))
                told: SimpleQueue[BaseException | None] = SimpleQueue()
                staging.bring_down([0], told.put)
                assert told.get(timeout=10) is None
                with streams.entered(streams.open()):  # where a sum is used first
                    staging.bring_up([0])
                staging.begin()
                staging._last_return = staging._last_return if is_waited_for else None
                staging.bring_down([0], told.put)
                assert told.get(timeout=10) is None
        finally:
            staging.close()


def test_a_sum_goes_up_once_an_iteration():
    staging, slots = staged(late=False)
    try:
        staging.mirror.slots[0].fill_(5)
        staging.bring_up([0])
        slots.slots[0].fill_(7)  # the script's
        staging.bring_up([0])
        assert slots.slots[0].tolist() == [7.0, 7.0]
        staging.begin()
        staging.bring_up([0])
        assert slots.slots[0].tolist() == [5.0, 5.0]
    finally:
        staging.close()


def test_what_runs_above_finds_the_sums_in_their_slots_and_tells_of_its_end_or_error():
    staging, slots = staged()
    found: list[list[float]] = []
    told: SimpleQueue[BaseException | None] = SimpleQueue()
    try:
        staging.mirror.slots[1].fill_(5)
        staging.run_above([1], lambda: found.extend(slot.tolist() for slot in slots.slots), told.put)
        assert told.get(timeout=10) is None
        assert found == [[1.0, 1.0], [5.0], [3.0]]
        staging.mirror.slots[1].fill_(6)
        staging.bring_up([0, 1])  # which has gone up already
        assert slots.slots[1].tolist() == [5.0]
        staging.run_above([], lambda: torch.ones(2) @ torch.ones(3), told.put)
        assert "size" in str(told.get(timeout=10))
        staging.then(told.put)
        assert told.get(timeout=10) is None
    finally:
        staging.close()


class _Broken(CheckedStreams):
    """A device that fails at the first copy down."""

    failed = False

    def open(self, urgent: bool = False) -> CheckedStream:
        stream = super().open(urgent)
        run = stream.run

        def fail(work: Callable[[], object], after: Iterable[Event] = ()) -> Event:
            if self.failed:
                return run(work, after)
            self.failed = True
            return _Failure()

        stream.run = fail  # type: ignore[method-assign]
        return stream


class _Failure:
    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise RuntimeError("an illegal memory access was encountered")


def test_a_device_that_fails_is_reported_and_the_next_gradient_still_goes():
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    staging = Staging(_Broken(late=True))
    told: SimpleQueue[BaseException | None] = SimpleQueue()
    try:
        staging.take_up(params, GradientBuffers(params))
        staging.bring_down([0], told.put)
        staging.bring_down([1], told.put)
        staging.then(told.put)
        errors = [str(told.get(timeout=10)) for _ in range(3)]
        assert errors == ["an illegal memory access was encountered", "None", "None"]
    finally:
        staging.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_the_streams_of_a_cuda_device_run_beside_the_scripts_own():
    device = torch.device("cuda")
    streams = DeviceStreams(device)
    data = torch.ones(1 << 20, device=device)
    host = streams.host_memory(data)
    assert host.is_pinned()
    data.mul_(2)
    end = streams.open().run(lambda: host.copy_(data, non_blocking=True), after=[streams.so_far()])
    end.synchronize()
    assert end.query()
    assert bool((host == 2).all())
