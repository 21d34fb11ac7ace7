"""The control channel by itself."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradlane.errors import CommunicationError, JobError, MismatchError, PeerDied, PeerFailed, PeerStalled, UnsupportedError
from gradlane.live.comm.control_channel import ControlChannel
from gradlane.live.comm.control_frames import BEAT, HASH, VERSION, Frame, header
from gradlane.live.comm.failures import Failures
from gradlane.live.comm.roll_call import RollCall
from tests.processes import AT_ONCE_S, no_descriptor_free

STALL_TIMEOUT_S = 1.0
TOKEN_DIGITS = 32
LONGER_S = 1.6  # when silence would have been noticed


def nothing(*_: object) -> None:
    return None


def channels(store: Any, world: int) -> Any:
    """ControlChannel, with a rank to come."""
    known = {"timeout_s": 30.0, "stall_timeout_s": STALL_TIMEOUT_S}
    callbacks = dict.fromkeys(("on_failure", "on_choice", "on_decision", "on_left"), nothing)

    def made(rank: int, **given: Any) -> ControlChannel:
        return ControlChannel(RollCall(store, rank, world), range(world), **{**known, **callbacks, **given})

    return made


def called(pool: ThreadPoolExecutor, store: Any, peers: str, on_failure: Any = nothing) -> Future[ControlChannel]:
    """Rank 1's channel, where rank 0 says that it listens as `peers` has it."""
    rank_0 = RollCall(store, 0, 2)
    rank_0.store.set("peers", peers)
    other = pool.submit(channels(store, 2), rank=1, on_failure=on_failure)
    store.wait(["here/1"])
    rank_0.call([1], lambda rank: "its token")
    return other


def end(channel: ControlChannel, rank: int) -> None:
    """End the connection with `rank`, as the kernel does when the process ends."""
    channel._drop(channel._protocol._by_rank[rank])


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, None),
        (LookupError("by the test"), "rank 1 failed: LookupError: by the test"),
        (KeyboardInterrupt(), "rank 1 failed: KeyboardInterrupt"),
        (CommunicationError("rank 1, iteration 3: no end of it"), "rank 1 stopped in iteration 3: no end of it"),
        (UnsupportedError("rank 1, iteration 3: a hook"), "rank 1 failed in iteration 3: UnsupportedError: a hook"),
        (CommunicationError("rank 1, in attach: no verdict"), "rank 1 stopped in attach: no verdict"),
        (CommunicationError("rank 1: nobody came"), "rank 1 stopped: nobody came"),
        (PeerFailed("transport: rank 1 failed: ValueError", None), "transport: rank 1 failed: ValueError"),
        (CommunicationError("rank 10 is late"), "rank 1 stopped: rank 10 is late"),
        (PeerFailed("rank 2 failed: ValueError", 2), "rank 1 stopped: rank 2 failed: ValueError"),
    ],
)
def test_a_rank_that_leaves_before_the_last_one_comes_has_come(error, told):
    left: list[tuple[int, JobError | None]] = []
    peers = channels(dist.HashStore(), 3)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(peers, rank=0, on_left=lambda rank, why: left.append((rank, why)))
        peers(rank=1).close(error)
        last = peers(rank=2)
        first.result(AT_ONCE_S).close()
        last.close()
    rank, why = left[0]
    assert rank == 1
    assert why is None if told is None else str(why) == told


@pytest.mark.parametrize("kind", [LookupError, ValueError, OSError])  # the last two are also what a broken connection raises
def test_an_exception_in_a_callback_fails_the_job_on_all_ranks(kind):
    heard: SimpleQueue[tuple[int, JobError]] = SimpleQueue()
    peers = channels(dist.HashStore(), 2)

    def decided(iteration: int, what: int) -> None:
        raise kind("by the test")

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(peers, rank=0, on_failure=lambda error: heard.put((0, error)))
        other = peers(rank=1, on_failure=lambda error: heard.put((1, error)), on_decision=decided)
        first.result(AT_ONCE_S).say(Frame.DECISION, 3, 1)
        failures = dict(heard.get(timeout=AT_ONCE_S) for _ in range(2))
        other.close()
        first.result().close()
    assert {str(error) for error in failures.values()} == {f"rank 1 failed: {kind.__name__}: by the test"}
    assert isinstance(failures[1].__cause__, kind)


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
        end(other, 0)
        assert isinstance(failures.get(timeout=AT_ONCE_S), PeerDied)
        os.close(ends)
        assert os.waitpid(child, 0)[1] == 0
        other.close()
        first.result().close()
        os.close(waits)


def test_a_rank_that_has_lost_rank_0_may_still_report_what_it_has_issued():
    lost = threading.Event()
    peers = channels(dist.HashStore(), 2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(peers, rank=0)
        other = peers(rank=1, on_failure=lambda error: lost.set())
        rank_0 = first.result(AT_ONCE_S)
        end(rank_0, 1)
        assert lost.wait(AT_ONCE_S)
        other.issued(3, 17)
        other.close()
        rank_0.close()


def test_a_rank_that_dies_while_others_are_awaited_is_named_at_once():
    store = dist.HashStore()
    peers = channels(store, 3)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(peers, rank=0)
        early = peers(rank=1)
        end(early, 0)
        with pytest.raises(PeerDied, match="rank 1 is gone"):
            first.result(AT_ONCE_S)
        early.close()


def test_a_rank_that_never_comes_is_named_to_those_that_have_come():
    heard: SimpleQueue[JobError] = SimpleQueue()
    peers = partial(channels(dist.HashStore(), 3), timeout_s=1.0)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(peers, rank=0)
        early = peers(rank=1, on_failure=heard.put)
        with pytest.raises(MismatchError, match=r"2 of 3 ranks called gradlane.attach within 1 s; missing: \[2\]"):
            first.result(2 * AT_ONCE_S)
        assert "missing: [2]" in str(heard.get(timeout=AT_ONCE_S))
        early.close()


def test_a_rank_that_was_silent_hears_that_it_was():
    heard: SimpleQueue[JobError] = SimpleQueue()
    peers = channels(dist.HashStore(), 2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(peers, rank=0)
        other = peers(rank=1, on_failure=heard.put)
        first.result(AT_ONCE_S)
        other._heartbeat.remove(other._protocol._by_rank[0].socket.fileno())  # as if it were stopped
        silent = heard.get(timeout=AT_ONCE_S)
        other.close()
        first.result().close()
    assert isinstance(silent, PeerStalled)
    assert silent.rank == 1


def test_a_rank_on_its_way_when_attach_fails_on_rank_0_hears_why():
    heard: SimpleQueue[JobError] = SimpleQueue()
    store = dist.HashStore()
    peers = channels(store, 3)
    with ThreadPoolExecutor(1) as pool:
        failed = threading.Event()
        first = pool.submit(peers, rank=0, on_failure=lambda error: failed.set())
        early, on_its_way = peers(rank=1), RollCall(store, 2, 3)
        assert on_its_way.wait_to_be_called(AT_ONCE_S)
        end(early, 0)
        assert failed.wait(AT_ONCE_S)
        late = ControlChannel(
            on_its_way,
            range(3),
            30.0,
            STALL_TIMEOUT_S,
            on_failure=heard.put,
            on_choice=nothing,
            on_left=nothing,
            on_decision=nothing,
        )
        assert str(heard.get(timeout=AT_ONCE_S)).startswith("rank 1 is gone")
        with pytest.raises(PeerDied, match="rank 1 is gone"):
            first.result(AT_ONCE_S)
        for channel in (early, late):
            channel.close()


def test_a_rank_on_which_rank_0_hangs_up_calls_again_until_it_is_answered():
    failed: SimpleQueue[JobError] = SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as rank_0, ThreadPoolExecutor(1) as pool:
        other = called(pool, dist.HashStore(), f"{VERSION} 127.0.0.1 {rank_0.getsockname()[1]}", failed.put)
        hello = header(Frame.HELLO, 1, len("its token")) + b"its token"
        for _ in range(3):
            rank_0.accept()[0].close()  # as where strangers take all places
        answered, _ = rank_0.accept()
        assert answered.recv(len(hello), socket.MSG_WAITALL) == hello
        channel = other.result(AT_ONCE_S)
        answered.settimeout(AT_ONCE_S)
        assert len(answered.recv(len(header(Frame.BEAT, 1, BEAT.size)), socket.MSG_WAITALL)) > 0  # it beats here now
        answered.sendall(header(Frame.BEAT, 0, BEAT.size) + BEAT.pack(0))
        channel.issued(3, 17)
        said = b""
        while header(Frame.ISSUED, 1, HASH.size) not in said:
            said += answered.recv(4096)
        assert failed.empty()
        answered.close()  # it had answered: now it is gone
        assert isinstance(failed.get(timeout=AT_ONCE_S), PeerDied)
        channel.close()


def test_another_version_of_the_control_channel_is_refused_by_name():
    with ThreadPoolExecutor(1) as pool:
        older = called(pool, dist.HashStore(), f"{VERSION + 1} 127.0.0.1 1")
        with pytest.raises(
            MismatchError, match=rf"rank 0's control channel is of version {VERSION + 1}, rank 1's of {VERSION}"
        ):
            older.result(AT_ONCE_S)


# -- calls that wait for other ranks ---------------------------------------------------------------------------


def test_a_call_that_waits_for_another_rank_ends_at_once_when_the_job_fails():
    failures, begun, released = Failures(1, 30.0, torch.device("cpu")), threading.Event(), threading.Event()

    def stuck() -> None:
        begun.set()
        released.wait(30)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(failures.collective, stuck)
        assert begun.wait(AT_ONCE_S)
        failures.fail(PeerStalled("rank 2 is stalled", 2))
        with pytest.raises(PeerStalled):
            waiting.result(AT_ONCE_S)
        released.set()


def test_a_call_returns_its_result_and_raises_its_own_error():
    failures = Failures(1, 30.0, torch.device("cpu"))
    assert failures.collective(lambda: 7) == 7
    with pytest.raises(LookupError, match="by the test"):
        failures.collective(lambda: (_ for _ in ()).throw(LookupError("by the test")))


def test_an_error_of_torch_that_nobody_explains_has_a_type_and_says_where():
    failures = Failures(1, 30.0, torch.device("cpu"))

    def lose() -> None:
        raise RuntimeError("connection reset\nby peer")

    with pytest.raises(
        CommunicationError, match=r"rank 1, in attach: rank 0's parameters failed in torch\.distributed: connection"
    ):
        failures.collective(lose, "rank 0's parameters")


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
    with socket.create_server(("127.0.0.1", 0)) as rank_0, ThreadPoolExecutor(1) as pool:
        other = called(pool, store, f"{VERSION} 127.0.0.1 {rank_0.getsockname()[1]}", lambda error: failed.set())
        with contextlib.closing(other.result(AT_ONCE_S)):
            failed.wait(LONGER_S)
    assert not failed.is_set()


def test_no_token_that_still_opens_a_door_can_be_read_in_the_store():
    store = dist.HashStore()
    if not hasattr(store, "list_keys"):
        pytest.skip("this release of PyTorch lists no keys of a store")
    peers = channels(store, 3)

    def readable() -> set[bytes]:
        return {bytes(store.get(key)) for key in store.list_keys()}

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(peers, rank=0)
        early = peers(rank=2)
        # rank 1 is still missing: a minute may pass until it comes
        assert not {value for value in readable() if len(value) == TOKEN_DIGITS}
        late = peers(rank=1)
        rank_0 = first.result(AT_ONCE_S)
        assert len(set(rank_0._protocol._tokens.values())) == 2
        assert not readable() & set(rank_0._protocol._tokens.values())
        for channel in (early, late, rank_0):
            channel.close()


@pytest.mark.parametrize(
    ("told", "expected", "says"),
    [
        (None, CommunicationError, "the sums of verification failed"),
        (PeerDied("rank 2 is gone", 2), PeerDied, "rank 2 is gone"),
    ],
    ids=["nobody explains it", "a rank is gone"],
)
def test_what_torch_refuses_to_begin_raises_why_the_job_has_failed(told, expected, says):
    failures = Failures(1, 30.0, torch.device("cpu"))
    if told is not None:
        failures.fail(told)
    with pytest.raises(expected, match=says), failures.explained("the sums of verification"):
        raise dist.DistBackendError("the communicator was aborted")


def test_who_calls_while_no_descriptor_is_free_is_hung_up_on():
    channel = channels(dist.HashStore(), 1)(rank=0)
    (listener,) = channel._listeners.values()
    with contextlib.closing(channel), socket.socket() as caller, socket.socket() as later:
        for each in (caller, later):
            each.settimeout(AT_ONCE_S)
        with no_descriptor_free():
            caller.connect(listener.getsockname())
            assert caller.recv(1) == b""
        later.connect(listener.getsockname())
        later.sendall(b"x" * 64)  # no frame: heard, and hung up on
        assert later.recv(1) == b""
