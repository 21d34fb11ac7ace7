"""The control channel by itself."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch.distributed as dist

from gradlane.errors import JobError, PeerDied
from gradlane.live.comm.control_channel import ControlChannel
from tests.processes import AT_ONCE_S

STALL_TIMEOUT_S = 1.0
LONGER_S = 1.6  # when silence would have been noticed


def nothing(*_: object) -> None:
    return None


def channels(store: Any, world: int) -> Any:
    """ControlChannel, with a rank to come."""
    known = {"timeout_s": 30.0, "stall_timeout_s": STALL_TIMEOUT_S}
    callbacks = dict.fromkeys(("on_failure", "on_choice", "on_decision", "on_left"), nothing)
    return partial(ControlChannel, store, ranks=range(world), **known, **callbacks)


def test_a_rank_that_leaves_before_the_last_one_comes_has_come():
    left: list[int] = []
    peers = channels(dist.HashStore(), 3)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(peers, rank=0, on_left=left.append)
        peers(rank=1).close()
        last = peers(rank=2)
        first.result(AT_ONCE_S).close()
        last.close()
    assert left[0] == 1


def test_an_exception_in_a_callback_fails_the_job_on_all_ranks():
    heard: SimpleQueue[tuple[int, JobError]] = SimpleQueue()
    peers = channels(dist.HashStore(), 2)

    def decided(iteration: int, what: int) -> None:
        raise LookupError("by the test")

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(peers, rank=0, on_failure=lambda error: heard.put((0, error)))
        other = peers(rank=1, on_failure=lambda error: heard.put((1, error)), on_decision=decided)
        first.result(AT_ONCE_S).decide(3, 1)
        failures = dict(heard.get(timeout=AT_ONCE_S) for _ in range(2))
        other.close()
        first.result().close()
    assert {str(error) for error in failures.values()} == {"rank 1 failed: LookupError: by the test"}
    assert isinstance(failures[1].__cause__, LookupError)


def test_a_forked_child_does_not_hide_the_end_of_its_parent():
    failures: SimpleQueue[JobError] = SimpleQueue()
    peers = channels(dist.HashStore(), 2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(peers, rank=0, on_failure=failures.put)
        other = peers(rank=1)
        first.result(AT_ONCE_S)
        waits, ends = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ends)
            os.read(waits, 1)
            other.close()
            os._exit(0)
        other._drop(other._connections[0])  # as the kernel does when the process ends
        assert isinstance(failures.get(timeout=AT_ONCE_S), PeerDied)
        os.close(ends)
        assert os.waitpid(child, 0)[1] == 0
        other.close()
        first.result().close()
        os.close(waits)


@pytest.mark.timing
def test_a_rank_that_came_early_hears_rank_0_while_it_waits_for_the_last():
    failed = threading.Event()
    peers = channels(dist.HashStore(), 3)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(peers, rank=0, on_failure=lambda error: failed.set())
        early = peers(rank=2, on_failure=lambda error: failed.set())
        failed.wait(LONGER_S)
        for channel in (peers(rank=1), first.result(AT_ONCE_S), early):
            channel.close()
    assert not failed.is_set()


@pytest.mark.timing
def test_rank_0_is_not_silent_before_it_has_come_to_a_rank():
    failed = threading.Event()
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as rank_0:
        store.set("peers", f"127.0.0.1 {rank_0.getsockname()[1]} token")
        with contextlib.closing(channels(store, 2)(rank=1, on_failure=lambda error: failed.set())):
            failed.wait(LONGER_S)
    assert not failed.is_set()
