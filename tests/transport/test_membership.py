"""Who takes part, and where: what must agree is named on all sides, who is missing by name, a port is what was asked for."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from gradlane.errors import CommunicationError, InputError, MismatchError, PeerDied
from gradlane.plugin.meeting import Meeting, Store
from gradlane.transport import Node, NodeOptions, WireLane
from gradlane.transport.formation import form
from tests.ports import free_port
from tests.processes import AT_ONCE_S
from tests.transport.jobs import Job, Outcome, each_with_a_server, job, servers_apart

pytestmark = pytest.mark.matrix


def met(options: list[NodeOptions]) -> tuple[list[Outcome], float]:
    """What joining came to for each, or what soon followed it, and in how many seconds."""
    running = Job(options)
    try:
        running.started()
        began = time.monotonic()
        running.dial()
        outcomes = running.all("join", 5.0)
        for at, member in enumerate(running.members):
            if not outcomes[at].error:  # its own connections were all there before the one that differs came
                outcomes[at] = running.all("wait_for_failure", 5.0, among=[member])[0]
        return outcomes, max(outcome.at for outcome in outcomes) - began
    finally:
        running.end()


DIFFERENCES = {
    "world": ({"world": 4}, "world size"),
    "servers": ({"servers": 4}, "number of servers"),
    "lanes": ({"lanes": (WireLane(), WireLane())}, "number of lanes"),
    "fingerprint": ({"fingerprint": b"f" * 32}, "fingerprints of model, plan and options differ"),
}


@pytest.mark.parametrize("what", DIFFERENCES)
@pytest.mark.parametrize("external", [False, True], ids=["servers with workers", "servers apart"])
def test_a_process_that_disagrees_is_refused_by_what_it_differs_in_on_all_sides(what: str, external: bool) -> None:
    different, text = DIFFERENCES[what]
    options = servers_apart(3, 2) if external else each_with_a_server(3)
    options[2] = NodeOptions(**{**vars(options[2]), **different})
    outcomes, took_s = met(options)
    assert [outcome.error for outcome in outcomes] == ["MismatchError"] * len(options), outcomes
    assert all(text in outcome.text for outcome in outcomes)
    assert took_s <= AT_ONCE_S


def test_one_who_knows_no_secret_is_told_so_and_the_rest_name_it_as_missing() -> None:
    options = each_with_a_server(3, secret=b"x" * 32)
    options[2] = NodeOptions(**{**vars(options[2]), "secret": b""})
    running = Job(options)
    try:
        running.started()
        running.dial()
        outcomes = running.all("join", 1.0)
    finally:
        running.end()
    assert outcomes[2].error == "AuthError"
    # 0 and 1 dial the server in the third process, too, and find that it does not know the secret
    assert {outcomes[0].error, outcomes[1].error} == {"AuthError"}


def test_missing_ranks_and_servers_are_named_when_the_time_to_join_is_up() -> None:
    with Node(NodeOptions(world=4, servers=4, rank=0, server=0)) as node:
        began = time.monotonic()
        with pytest.raises(CommunicationError, match=r"server 1, server 2, server 3, rank 1, rank 2, rank 3"):
            node.join(0.7)
        assert time.monotonic() - began <= AT_ONCE_S


@pytest.mark.parametrize("rank", [2, -5, 70000])
def test_a_rank_out_of_range_is_refused_at_once(rank: int) -> None:
    with pytest.raises(InputError, match="rank: expected one below the world size"):
        Node(NodeOptions(world=2, servers=2, rank=rank, server=1))


def test_nobody_at_the_address_is_told_at_once() -> None:
    port = free_port()
    with Node(NodeOptions(world=2, servers=2, rank=0, server=0)) as node:
        began = time.monotonic()
        node.dial(1, "127.0.0.1", port)
        with pytest.raises(PeerDied, match=r"rank 1 at 127\.0\.0\.1:\d+: .*refused"):
            node.join(5)
        assert time.monotonic() - began <= AT_ONCE_S


def test_a_port_in_use_is_refused_by_its_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(CommunicationError, match=rf"bind 127\.0\.0\.1 port {port}: Address already in use"):
            Node(NodeOptions(world=1, servers=1, rank=0, server=0, port=port))
        assert time.monotonic() - began <= AT_ONCE_S


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("192.0.2.7", r"bind 192\.0\.2\.7 port 0: Cannot assign requested address"),
        ("localhost", "expected an IPv4 or IPv6 literal"),
        ("", "expected an IPv4 or IPv6 literal"),
        ("127.0.0.1 ", "expected an IPv4 or IPv6 literal"),
    ],
)
def test_an_address_that_is_not_this_hosts_is_refused(address: str, text: str) -> None:
    with pytest.raises(CommunicationError, match=text):
        Node(NodeOptions(world=1, servers=1, rank=0, server=0, address=address, secret=b"x" * 32))


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.1", "fe80::1"])
def test_a_server_off_loopback_needs_a_secret(address: str) -> None:
    with pytest.raises(InputError, match="a server off loopback needs a secret"):
        Node(NodeOptions(world=1, servers=1, rank=0, server=0, address=address))


def listening(port: int, pid: int | None = None) -> list[str]:
    """The addresses on which this process, or `pid`, listens at `port`, as the kernel writes them."""
    own = set()
    for fd in Path(f"/proc/{pid or 'self'}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(fd))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            address, hex_port = words[1].rsplit(":", 1)
            if words[3] == "0A" and int(hex_port, 16) == port and f"socket:[{words[9]}]" in own:
                found.append(address)
    return found


def test_a_server_listens_on_exactly_the_address_it_was_given() -> None:
    with Node(NodeOptions(world=1, servers=1, rank=0, server=0, address="127.0.0.3")) as node:
        assert listening(node.port) == ["0300007F"]
    with Node(NodeOptions(world=2, servers=1, rank=1, server=None)) as worker:
        assert worker.port == 0
    assert listening(node.port) == []


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this host has no IPv6 loopback")
def test_a_job_over_ipv6_sums_and_listens_on_ipv6_alone() -> None:
    with job(each_with_a_server(2, address="::1")) as running:
        assert listening(running[0].port, running[0].pid) == ["00000000000000000000000001000000"]
        assert [outcome.value for outcome in running.all("iterate", 3)] == [3, 3]


UNLIKE = {
    "size": {"size_bytes": 199_996},
    "type": {"dtype": "int32"},
    "operation": {"op": "min"},
    "receiver": {"receiver": 0},
    "priority": {"priority": 3},
}


@pytest.mark.parametrize("what", UNLIKE)
def test_operations_that_ranks_mean_differently_are_a_mismatch_on_both(what: str) -> None:
    with (
        Node(NodeOptions(world=2, servers=2, rank=0, server=0, linger_s=0.1)) as first,
        Node(NodeOptions(world=2, servers=2, rank=1, server=1, linger_s=0.1)) as second,
    ):
        first.dial(1, "127.0.0.1", second.port)
        second.dial(0, "127.0.0.1", first.port)
        for node in (first, second):
            node.join(5)
        tensors = [np.ones(50_000, np.float32), np.ones(50_000, np.float32)]
        meant = {"size_bytes": 200_000, "dtype": "float32"}
        began = time.monotonic()
        for node, tensor, differs in zip((first, second), tensors, ({}, UNLIKE[what]), strict=True):
            node.start(0, tensor.ctypes.data, tensor.ctypes.data, **{**meant, **differs})
        for node in (first, second):
            with pytest.raises(MismatchError):
                node.take(5)  # not wait(): a part may be over before the other's comes
        assert time.monotonic() - began <= AT_ONCE_S


def test_the_secret_is_in_the_store_only_while_all_who_read_it_are_there() -> None:
    port = free_port()
    first, second = each_with_a_server(2)
    stores = [Store(Meeting(rank, 2, "127.0.0.1", port), 5.0) for rank in range(2)]
    server = stores[0]._connection._server
    values = server.values
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as ends:
        ends.callback(server.server_close)
        ends.callback(server.shutdown)
        for store in stores:
            ends.callback(store._connection._socket.close)
            ends.callback(store._connection._file.close)
        forming = pool.submit(form, stores[0], first, "127.0.0.1", 10.0)
        stores[1].wait(["host/rank 0"], timedelta(seconds=AT_ONCE_S))
        assert not [key for key in values if "secret" in key]  # rank 1 may be a minute away
        with form(stores[1], second, "127.0.0.1", 10.0) as node, forming.result(AT_ONCE_S) as other:
            secret = node.options.secret.hex()
            assert len(secret) == 64
            assert other.options.secret == node.options.secret
            assert secret not in values.values()
