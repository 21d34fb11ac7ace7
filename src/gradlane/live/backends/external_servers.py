"""External servers: parameter servers in processes of their own (`gradlane server`), and how a
session calls them.

Whenever a session needs servers, at attach and for a plan with other lanes, rank 0 writes a call with the next number to the
job's store. Workers and servers then connect under that number. Each server that is free takes the next place of the last call.
It answers one call after another until the job has ended, when the store is gone. So places are given anew with each call, and
a server that is started in place of one that was killed serves the job's next attempt.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import msgspec
import torch.distributed as dist

from gradlane.errors import CommunicationError, JobError, UnsupportedError
from gradlane.live.backends.addresses import named_address, own_address, route, store_address
from gradlane.transport import FOR_EVER_S, Node, NodeOptions, WireLane
from gradlane.transport.formation import form
from gradlane.units import counted, format_bytes

_PREFIX = "gradlane/servers"
_TRY_EVERY_S = 0.1
_LOOK_EVERY_S = 0.02  # a wait of torch's store that ends by its timeout is two lines in its log
_HOW_TO_USE = 'ranks use N of them by gradlane.attach(..., backend="server", servers=N) or gradlane launch --await-servers N'
_ANSWER_S = 2.0  # for torch to tell of its own timeout
_SAY_EVERY_S = 10.0  # while a server waits for the job's store


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rank 0's call to the servers: those of `NodeOptions` that they share with the workers."""

    world: int
    servers: int
    generation: int
    fingerprint: bytes
    packet_bytes: int
    rank_order: bool
    lanes: tuple[tuple[int, int], ...]  # (dscp, socket_priority)
    dead_s: float
    timeout_s: float

    @staticmethod
    def of(options: NodeOptions, timeout_s: float) -> Call:
        lanes = tuple((lane.dscp, lane.socket_priority) for lane in options.lanes)
        shared = (options.world, options.servers, options.generation, options.fingerprint, options.packet_bytes)
        return Call(*shared, options.rank_order, lanes, options.dead_s, timeout_s)

    def options(self, server: int, max_bytes: int) -> NodeOptions:
        return NodeOptions(
            world=self.world,
            servers=self.servers,
            rank=None,
            server=server,
            generation=self.generation,
            fingerprint=self.fingerprint,
            packet_bytes=self.packet_bytes,
            rank_order=self.rank_order,
            tell_tables=True,
            lanes=tuple(WireLane(*lane) for lane in self.lanes),
            dead_s=self.dead_s,
            max_bytes=max_bytes,
        )


def connections(servers: int) -> str:
    """What a rank waits for while it connects with the others and with so many external servers, for messages."""
    return f"the connections, also to {counted(servers, 'gradlane servers')}" if servers else "the connections"


def join_servers(store: Any, options: NodeOptions, timeout_s: float, at: str | None = None) -> Node:
    """Connect this worker with the other workers, and with the servers beside them or in processes of their own (collective).

    Args:
        store: for this call alone, a prefix of the job's.
        options: of this worker. With `tell_tables` servers run in processes of their own.
        timeout_s: seconds to connect.
        at: "host:port" of the store that such servers connect to; None for the job's own.

    Returns:
        The connected node.

    Raises:
        UnsupportedError: the job's store is not a TCPStore, which servers could reach.
        CommunicationError: no store at `at`, or rank 0 called no servers in time.
        JobError: as `transport.formation.form`.
    """
    if not options.tell_tables:
        return form(store, options, own_address(), timeout_s, store_address=store_address())
    place = _connect(at, timeout_s, lambda _: None) if at else _job_store(store)
    if options.rank == 0:
        number = place.add(f"{_PREFIX}/calls", 1) - 1
        place.set(f"{_PREFIX}/call/{number}", msgspec.json.encode(Call.of(options, timeout_s)))
        store.set("call", str(number))
    try:
        store.wait(["call"], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise CommunicationError(f"rank {options.rank}: rank 0 called no servers within {timeout_s:.0f} s ({error})") from None
    return form(_meeting(place, int(store.get("call"))), options, own_address(), timeout_s, store_address=store_address())


def _job_store(store: Any) -> Any:
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        raise UnsupportedError(
            f"servers of their own meet the job at its TCPStore, and this job has a {type(store).__name__}; start it with "
            "gradlane launch or torchrun"
        )
    return store


def _connect(at: str, timeout_s: float, say: Callable[[str], None]) -> Any:
    host, _, port = at.rpartition(":")
    _await_listener(host.strip("[]"), int(port), timeout_s, say)
    limit_s = timeout_s + _ANSWER_S
    answers: SimpleQueue[Any] = SimpleQueue()

    def connect() -> None:
        wait = timedelta(seconds=timeout_s)
        try:
            store = dist.TCPStore(host.strip("[]"), int(port), None, is_master=False, timeout=wait, wait_for_workers=False)  # type: ignore[attr-defined]
        except (RuntimeError, dist.DistError) as error:
            answers.put(error)
        else:
            answers.put(store)

    # beside it, since torch waits without end for the first answer of what accepts connections and says nothing
    Thread(target=connect, name="gradlane-connect", daemon=True).start()
    try:
        answer = answers.get(timeout=limit_s)
    except Empty:
        raise CommunicationError(
            f"what listens at {at} gave no answer within {limit_s:g} s; expected the store of a job: does its host stand "
            "still, or is it a proxy?"
        ) from None
    if isinstance(answer, Exception):
        reason = str(answer).partition("\n")[0]
        raise CommunicationError(f"what listens at {at} is no store of a job: {reason}")
    return answer


def _await_listener(host: str, port: int, timeout_s: float, say: Callable[[str], None]) -> None:
    """Wait until something listens. torch's store waits too, but silently and for up to twice its timeout."""
    say(f"waiting up to {timeout_s:g} s for a job's store at {host}:{port}")
    began, heard, reason = time.monotonic(), _SAY_EVERY_S, ""
    while (waited := time.monotonic() - began) < timeout_s:
        try:
            socket.create_connection((host, port), timeout=min(timeout_s - waited, _SAY_EVERY_S)).close()
            return
        except OSError as error:
            reason = str(error)
        if waited >= heard:
            say(f"still waiting for a job's store at {host}:{port}, {waited:.0f} of {timeout_s:g} s: {reason}")
            heard += _SAY_EVERY_S
        time.sleep(_TRY_EVERY_S)
    raise CommunicationError(
        f"no store of a job at {host}:{port} within {timeout_s:g} s ({reason}); expected the --rdzv-endpoint, or MASTER_ADDR "
        "and MASTER_PORT, of a job that runs or is about to: see whether its rank 0 has started and the port is open"
    )


def serve(
    at: str,
    say: Callable[[str], None],
    warn: Callable[[str], None],
    *,
    address: str | None = None,
    max_bytes: int | None = None,
    wait_s: float = 60.0,
) -> bool:
    """Run a parameter server until the job's store is gone.

    Args:
        at: "host:port" of the job's store.
        say, warn: called with each line of the server's report; `warn` with errors, and if the job needed no such server.
        address: to listen on; by default that of the interface which a variable names (docs/clusters.md), else this
            host's address on the route to the store.
        max_bytes: the memory that a job may need here, for what is kept and for all packets that may be in flight; by default
            this host's memory. The server refuses a job that may need more.
        wait_s: seconds for the job's store to appear, since servers may be started before the job.

    Returns:
        Whether every call it served ended without a failure.

    Raises:
        CommunicationError: no store at `at` within `wait_s`.
    """
    store = _connect(at, wait_s, say)
    towards, reached = route(store.host, store.port)
    address = address or named_address() or towards
    max_bytes = max_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # of the calls that were made before, all but the last are over
    number, well, was_needed = max(0, store.add(f"{_PREFIX}/calls", 0) - 1), True, False
    say(f"this server has come to the job at {at}")
    while (call := _next_call(store, number)) is not None:
        server = store.add(f"{_PREFIX}/places/{number}", 1) - 1
        if server < call.servers:
            was_needed = True
            well = _serve_one(_UntilNextCall(store, number), call, server, address, reached, max_bytes, say, warn) and well
        else:
            say(f"this server is not needed: the job asks for {call.servers}, which it has")
        number += 1
    if was_needed:
        say("the job is over")
    else:
        warn(f"the job is over and has not needed this server; {_HOW_TO_USE}")
    return well


class _UntilNextCall:
    """The store of one call, as `formation.form` uses it, in which a wait ends when the job calls again.

    A job whose attempt ended while its processes met waits for nobody.
    """

    def __init__(self, job_store: Any, number: int) -> None:
        self._job_store, self._next = job_store, f"{_PREFIX}/call/{number + 1}"
        self._store = _meeting(job_store, number)
        self.set, self.get, self.delete_key = self._store.set, self._store.get, self._store.delete_key

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Raises `RuntimeError` after `timeout`, or when there is another call."""
        deadline = time.monotonic() + timeout.total_seconds()
        while not self._store.check(keys):
            if self._job_store.check([self._next]):
                raise RuntimeError("the job has called again")
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing came within {timeout.total_seconds():.0f} s")
            time.sleep(_LOOK_EVERY_S)


def _next_call(store: Any, number: int) -> Call | None:
    key = f"{_PREFIX}/call/{number}"
    try:
        store.wait([key], timedelta(seconds=FOR_EVER_S))
        return msgspec.json.decode(store.get(key), type=Call)
    except (RuntimeError, dist.DistError):
        return None


def _serve_one(
    store: Any,
    call: Call,
    server: int,
    address: str,
    reached: str,
    max_bytes: int,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> bool:
    try:
        with form(store, call.options(server, max_bytes), address, call.timeout_s, store_address=reached) as node:
            say(
                f"server {server} of {call.servers} serves {call.world} workers on {node.options.address}:{node.port}, "
                f"packets of {format_bytes(node.options.packet_bytes)}"
            )
            while not node.await_goodbyes(FOR_EVER_S):
                pass
            stats = node.stats()
    except JobError as error:
        warn(f"server {server}: {error}")
        return False
    held = format_bytes(stats["most_held_bytes"])
    say(f"server {server}: all workers have left; {format_bytes(stats['received_bytes'])} summed, at most {held} held at once")
    return True


def _meeting(job_store: Any, number: int) -> Any:
    return dist.distributed_c10d.PrefixStore(f"{_PREFIX}/meeting/{number}", job_store)
