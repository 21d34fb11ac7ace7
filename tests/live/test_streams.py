"""Devices with streams: what is on them is used only once it is there, whatever they do early or late."""

from __future__ import annotations

import threading

import pytest
import torch

from gradlane.live.backends.gradient_buffers import MessageBuffer
from gradlane.live.backends.staging import Staging
from gradlane.live.backends.streams import DeviceStreams
from tests.live.streams import HostStreams

POLICIES = {
    "all-reduce": ["wfbp", ["bytescheduler", {"partition_bytes": 1000, "credit_bytes": 3000}], "mg-wfbp"],
    "server": ["wfbp", ["bytescheduler", {"partition_bytes": 1000, "credit_bytes": 3000}], "mercury", "geryon"],
}


@pytest.mark.parametrize("eager", [False, True], ids=["lazy streams", "eager streams"])
@pytest.mark.parametrize("backend", POLICIES)
def test_a_device_with_streams_gives_the_bits_of_ddp(two_ranks, backend, eager):
    found = two_ranks.run(
        "tests.live.cases:equals_ddp_with_streams",
        eager=eager,
        model="convolutions",
        optimizer="sgd",
        policies=POLICIES[backend],
        steps=12,
        backend=backend,
    )
    assert found == [{str(policy): [] for policy in POLICIES[backend]}] * 2


@pytest.mark.parametrize("backend", POLICIES)
def test_the_host_waits_for_the_device_at_each_gradient_of_a_measured_iteration_and_of_no_other(two_ranks, backend):
    for gradients, waits in two_ranks.run("tests.live.cases:waits_for_the_device", backend=backend):
        first, *measured, after = waits[0], waits[1], waits[2], waits[3:]
        assert first == 0
        assert all(count > gradients for count in measured)
        assert sum(after) == 0


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


def test_a_message_goes_down_and_comes_back_when_it_is_waited_for_and_not_before():
    staging = Staging(HostStreams(eager=False))
    try:
        parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
        buffer = MessageBuffer(parts)
        (memory,) = staging.prepare([buffer])
        down = threading.Event()
        errors: list[BaseException | None] = []

        def then(error: BaseException | None) -> None:
            errors.append(error)
            down.set()

        staging.bring_down(0, buffer, [], then)
        assert down.wait(10)
        assert errors == [None]
        assert memory.tolist() == [1.0, 2.0, 3.0]
        memory.mul_(10)
        staging.bring_up(0, buffer)
        assert not staging.has_ended(0)
        assert parts[0].tolist() == [1.0, 2.0]
        staging.join(0)
        assert staging.has_ended(0)
        assert [part.tolist() for part in parts] == [[10.0, 20.0], [30.0]]
    finally:
        staging.close()


class _Broken:
    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise RuntimeError("an illegal memory access was encountered")


def test_a_device_that_fails_is_reported_and_the_next_message_still_goes():
    staging = Staging(HostStreams(eager=False))
    try:
        buffers = [MessageBuffer([torch.ones(4)]) for _ in range(2)]
        staging.prepare(buffers)
        errors: list[BaseException | None] = []
        both = threading.Barrier(2)

        def then(error: BaseException | None) -> None:
            errors.append(error)
            if len(errors) == 2:
                both.wait(10)

        staging.bring_down(0, buffers[0], [_Broken()], then)
        staging.bring_down(1, buffers[1], [], then)
        both.wait(10)
        assert [str(error) for error in errors] == ["an illegal memory access was encountered", "None"]
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
