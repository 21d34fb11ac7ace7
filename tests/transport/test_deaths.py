"""Processes that die, stop, fall behind or leave: everybody else ends in time, and names the one it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gradlane.transport import Node, NodeOptions
from tests.processes import AT_ONCE_S
from tests.transport.jobs import Member, blamed, each_with_a_server, is_job_error, job, servers_apart
from tests.transport.proxy import Proxy

pytestmark = pytest.mark.matrix

DEAD_S = 2.5
"""The limit of silence. What is known sooner was told by the end of a connection."""
LARGE = (64 << 20,)


@pytest.fixture
def relays() -> Iterator[list[Proxy]]:
    """To be filled; all end with the test."""
    made: list[Proxy] = []
    yield made
    for relay in made:
        relay.close()


@pytest.mark.parametrize("kill", range(5))
def test_a_worker_killed_in_mid_push_is_named_by_all_at_once_and_no_partial_sum_is_seen(kill: int) -> None:
    with job(each_with_a_server(3)) as running:
        for member in running.members:
            member.begin("iterate_until_failure")  # asserts that what was reported done is whole
        running[1].wait_for_iterations(1 + kill)  # it pushes again at once
        at = running[1].signal(signal.SIGKILL)
        outcomes = [running[rank].outcome() for rank in (0, 2)]
    assert blamed(outcomes) == [("PeerDied", 1)] * 2
    assert all("rank 1 at 127.0.0.1:" in outcome.text for outcome in outcomes)  # not by its server's number
    assert max(outcome.at for outcome in outcomes) - at < DEAD_S


def test_a_worker_killed_among_servers_apart_is_named_by_workers_and_servers() -> None:
    with job(servers_apart(3, 2)) as running:
        for member in running.workers:
            member.begin("iterate_until_failure")
        running[2].wait_for_iterations(2)
        at = running[2].signal(signal.SIGKILL)
        outcomes = [running[rank].outcome() for rank in (0, 1)]
        outcomes += running.all("wait_for_failure", among=running.members[3:])
    assert blamed(outcomes) == [("PeerDied", 2)] * 4
    assert all("rank 2 at 127.0.0.1:" in outcome.text for outcome in outcomes)
    assert max(outcome.at for outcome in outcomes) - at < DEAD_S


def test_a_killed_server_is_named_by_workers_and_by_the_other_server() -> None:
    with job(servers_apart(2, 2)) as running:
        for member in running.workers:
            member.begin("iterate_until_failure")
        running[0].wait_for_iterations(2)
        at = running[3].signal(signal.SIGKILL)
        outcomes = [member.outcome() for member in running.workers]
        outcomes += running.all("wait_for_failure", among=[running[2]])
    assert blamed(outcomes) == [("PeerDied", None)] * 3  # of no rank
    assert all("server 1 at 127.0.0.1:" in outcome.text for outcome in outcomes)
    assert max(outcome.at for outcome in outcomes) - at < DEAD_S


def test_whoever_is_named_in_a_failure_is_so_even_to_those_whom_a_frame_under_way_keeps_from_hearing(
    relays: list[Proxy],
) -> None:
    """Rank 0's connection to the server crawls, in mid-frame nearly always; the server's word still comes before its end."""

    def through(rank: int, server: int, address: str, port: int) -> tuple[str, int]:
        if rank != 0:
            return address, port
        relays.append(Proxy((address, port), holds_bytes=128 << 10))
        return relays[0].address

    with job(servers_apart(2, 1), LARGE, through) as running:
        for member in running.workers:
            member.begin("iterate_until_failure")
        running[0].wait_for_iterations(1)
        relays[0].bytes_per_second = 4e6
        relays[0].wait_for_bytes("down", 1 << 20)
        at = running[1].signal(signal.SIGKILL)
        outcome = running[0].outcome()
    assert (outcome.error, outcome.rank) == ("PeerDied", 1)
    assert outcome.at - at <= DEAD_S


@pytest.mark.timing
def test_a_pause_of_a_second_is_no_death() -> None:
    with job(each_with_a_server(3)) as running:
        running.all("iterate", 3)
        for member in running.members:
            member.begin("iterate_for", 2.0)
        running[1].wait_for_iterations(2)
        running[1].signal(signal.SIGSTOP)
        time.sleep(1)  # the pause
        running[1].signal(signal.SIGCONT)
        outcomes = [member.outcome() for member in running.members]
    assert [outcome.error for outcome in outcomes] == [""] * 3
    assert len({outcome.value for outcome in outcomes}) == 1


@pytest.mark.timing
@pytest.mark.parametrize("sizes", [(4,), LARGE], ids=["waiting", "in mid-send"])
def test_a_stopped_worker_stalls_after_the_limit_and_hears_of_it_when_it_wakes(sizes: tuple[int, ...]) -> None:
    with job(each_with_a_server(3), sizes) as running:
        for member in running.members:
            member.begin("iterate_until_failure")
        running[1].wait_for_iterations(1)
        at = running[1].signal(signal.SIGSTOP)
        outcomes = [running[rank].outcome() for rank in (0, 2)]
        running[1].signal(signal.SIGCONT)
        its_own = running[1].outcome()
    assert blamed(outcomes) == [("PeerStalled", 1)] * 2
    assert is_job_error(its_own.error)
    if sizes == (4,):  # where a frame was under way to it, nobody could tell it why
        assert blamed([its_own]) == [("PeerStalled", 1)]
    after_s = [outcome.at - at for outcome in outcomes]
    assert min(after_s) >= 1, after_s  # a busy machine may have kept it silent for a while before
    assert max(after_s) <= 2 * DEAD_S, after_s


def test_a_worker_that_is_behind_is_waited_for_however_much_waits_for_it() -> None:
    """192 MiB against a rank that comes to it 4 s later: more than is kept for it, longer than the limit of silence."""
    with job(each_with_a_server(2), sizes=None) as running:
        running[0].call("define", (192 << 20,))
        running[0].begin("iterate", 1)
        time.sleep(4)  # how late it comes
        running[1].call("define", (192 << 20,))
        running[1].begin("iterate", 1)
        outcomes = [member.outcome() for member in running.members]
    assert [outcome.text for outcome in outcomes] == ["", ""]


@pytest.mark.parametrize("task", ["wait_for_failure", "iterate_until_failure"], ids=["idle", "sending"])
def test_a_connection_that_swallows_everything_is_found_by_both_ends(relays: list[Proxy], task: str) -> None:
    def through(rank: int, server: int, address: str, port: int) -> tuple[str, int]:
        relays.append(Proxy((address, port)))
        return relays[-1].address

    with job(each_with_a_server(2), through=through) as running:
        for member in running.members:
            member.begin(task)
        for relay in relays:
            relay.wait_for_bytes("up", 1)
        at = time.monotonic()
        for relay in relays:
            relay.swallow()
        outcomes = [member.outcome() for member in running.members]
    assert blamed(outcomes) == [("PeerStalled", 1), ("PeerStalled", 0)]
    assert max(outcome.at for outcome in outcomes) - at <= 2 * DEAD_S


def test_a_reset_connection_ends_the_job(relays: list[Proxy]) -> None:
    def through(rank: int, server: int, address: str, port: int) -> tuple[str, int]:
        if rank == 0:
            return address, port
        relays.append(Proxy((address, port)))
        return relays[-1].address

    with job(each_with_a_server(2), through=through) as running:
        for member in running.members:
            member.begin("iterate_until_failure")
        running[1].wait_for_iterations(2)
        at = time.monotonic()
        relays[0].reset()
        outcomes = [member.outcome() for member in running.members]
    assert {outcome.error for outcome in outcomes} == {"PeerDied"}
    assert max(outcome.at for outcome in outcomes) - at < DEAD_S


def test_a_worker_ended_by_sigterm_is_named_by_the_others() -> None:
    with job(each_with_a_server(3)) as running:
        for member in running.members:
            member.begin("iterate_until_failure")
        running[1].wait_for_iterations(2)
        at = running[1].signal(signal.SIGTERM)
        outcomes = [running[rank].outcome() for rank in (0, 2)]
        running[1].process.join(5)
        assert running[1].process.exitcode == -signal.SIGTERM
    assert blamed(outcomes) == [("PeerDied", 1)] * 2
    assert max(outcome.at for outcome in outcomes) - at < DEAD_S


def _exit_in_order_on_sigterm(member: Member) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    member.push()
    member.iterated.release()  # it goes on to wait
    member.take(60)


def test_sigterm_reaches_its_handler_in_the_middle_of_a_wait_and_the_worker_leaves_in_order() -> None:
    with job(each_with_a_server(2)) as running:
        running[1].begin("apply", _exit_in_order_on_sigterm)
        running[1].wait_for_iterations(1)
        at = running[1].signal(signal.SIGTERM)
        running[1].process.join(5)
        assert running[1].process.exitcode == 143
        running[0].begin("iterate_until_failure")
        outcome = running[0].outcome()
    assert (outcome.error, outcome.rank) == ("PeerDied", 1)
    assert outcome.at - at <= 5


def _keep_forking(member: Member, forks: int) -> tuple[int, float]:
    """Fork while tensors are on their way; a child's exit code is how many TCP sockets it has."""
    worst_s, faults = 0.0, 0
    for _ in range(forks):
        member.push()
        pid = os.fork()
        if pid == 0:
            member.node.close()  # does nothing: the node is its parent's
            os._exit(len([fd for fd in os.listdir("/proc/self/fd") if _is_tcp(fd)]))
        began = time.monotonic()
        faults += os.waitpid(pid, 0)[1] != 0
        worst_s = max(worst_s, time.monotonic() - began)
        member.take()
    return faults, worst_s


def _is_tcp(fd: str) -> bool:
    try:
        inode = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False
    return inode.startswith("socket:[") and f" {inode[8:-1]} " in Path("/proc/self/net/tcp").read_text()


def test_a_forked_child_has_none_of_its_parents_connections_and_the_parent_goes_on() -> None:
    with job(each_with_a_server(2)) as running:
        running[0].begin("apply", _keep_forking, 50)
        running[1].call("iterate", 50)
        outcome = running[0].outcome()
        assert not outcome.error, outcome.text
        faults, worst_s = outcome.value
        assert faults == 0
        assert worst_s < DEAD_S
        running.all("iterate", 3)


def _leave_a_child_behind(member: Member) -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(20)
        os._exit(0)
    return pid


def test_a_death_is_seen_at_once_though_a_child_of_the_dead_lives_on() -> None:
    with job(each_with_a_server(2)) as running:
        child = running[1].call("apply", _leave_a_child_behind)
        try:
            running[0].begin("wait_for_failure")
            at = running[1].signal(signal.SIGKILL)
            outcome = running[0].outcome()
        finally:
            os.kill(child, signal.SIGKILL)
    assert (outcome.error, outcome.rank) == ("PeerDied", 1)
    assert outcome.at - at < DEAD_S


SCRIPT = """
import sys, time
import numpy as np
from gradlane.transport import Node, NodeOptions
node = Node(NodeOptions(world=2, servers=2, rank=1, server=1))
print(node.port, flush=True)
node.dial(0, "127.0.0.1", int(sys.stdin.readline()))
node.join(10)
tensor = np.ones(1 << 22, np.float32)
node.define(0, tensor.ctypes.data, tensor.nbytes, "float32")
node.push(0)
node.wait(0, 10)
print(f"{time.monotonic()}", flush=True)
"""


def test_an_interpreter_that_exits_without_close_still_sends_what_others_wait_for_and_ends_soon() -> None:
    with (
        Node(NodeOptions(world=2, servers=2, rank=0, server=0)) as node,
        subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other,
    ):
        assert other.stdin is not None
        assert other.stdout is not None
        node.dial(1, "127.0.0.1", int(other.stdout.readline()))
        print(node.port, file=other.stdin, flush=True)
        node.join(10)
        tensor = np.ones(1 << 22, np.float32)
        node.define(0, tensor.ctypes.data, tensor.nbytes, "float32")
        node.push(0)
        node.wait(0, 10)
        assert (tensor == 2).all()
        done_at = float(other.stdout.readline())
        node.close()
        assert other.wait(10) == 0
        assert time.monotonic() - done_at <= AT_ONCE_S
