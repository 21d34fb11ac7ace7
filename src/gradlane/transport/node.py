"""Node: one process's part in the data plane, with the native module's codes as typed errors.

It owns no memory: the caller keeps a registered tensor alive until it is done or forgotten. Every wait ends within
its timeout, with a result or an error of `gradlane.errors`; every call after the first failure raises that failure.
Once an error is raised, the node neither writes to the memory of tensors that are not done nor reads it. Any thread
may call any method; those that wait release the GIL.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gradlane._native import Node as NativeNode
from gradlane._native import Transfer as Transfer
from gradlane._native import start_node
from gradlane.core.plan import Wire, returns_whole
from gradlane.errors import (
    AuthError,
    CapacityError,
    CommunicationError,
    CorruptError,
    InputError,
    JobError,
    MismatchError,
    PeerDied,
    PeerFailed,
    PeerStalled,
)
from gradlane.transport.forks import spare_in_child
from gradlane.transport.rules import PARTS, Part, Rule

FOR_EVER_S = 10**6.0
"""Seconds, for waits that end only with what is awaited or by an error."""
ALL = -1
"""`sender`: every worker contributes. `receiver`: every worker gets the result."""
ANYONE = -1
"""`source` of a message: whoever sent it."""
SHARDED = -1
"""`at`: a tensor's packets are distributed over all servers."""

DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3, "int8": 4, "uint8": 5, "int32": 6, "int64": 7}
OPS = {"sum": 0, "min": 1, "max": 2, "product": 3}

_DIED, _STALLED, _ABORTED, _LEFT, _MISMATCH, _AUTH, _DUPLICATE, _CORRUPT = 1, 2, 3, 4, 5, 6, 7, 8
_FULL = 11
_MOST_MS = 2**32 - 1
_QUIET, _PLACE, _PART_AT = 2, 4, 3  # flags of a push


@dataclass(frozen=True)
class WireLane:
    """How a lane's packets are marked: DSCP (0 to 63), SO_PRIORITY (0 to 6 without privilege)."""

    dscp: int = 0
    socket_priority: int = 0


@dataclass(frozen=True)
class NodeOptions:
    """What a node is and how it sends.

    Attributes:
        rank: of the worker in this process; None: no worker.
        server: number of the server in this process; None: no server.
        job, generation: identify the job.
        fingerprint: 32 bytes, a digest of all that must be equal on all members.
        secret: proves that a process belongs to the job; needed if a server listens off loopback.
        address, port: where the server listens; port 0: any.
        packet_bytes: largest packet.
        rank_order: add contributions in rank order, whatever order they arrive in, so that the bits
            of a sum do not depend on the schedule.
        checksum: whether packets have one.
        deal_evenly: distribute each tensor evenly over the servers (for tensors that come one at a time), not the whole table.
            Connections then take turns, so that all end at about the same time.
        tell_tables: servers run in processes without a worker, and workers tell them of each
            tensor.
        lanes: how packets of each lane are marked.
        unsent_bytes: how many bytes the kernel may hold unsent; fewer means that the next packet is
            chosen later.
        send_buffer_bytes, congestion: socket options; 0 and "": the kernel's defaults.
        ping_s, dead_s: a peer that sends nothing for `dead_s` seconds is stalled; pings go every
            `ping_s`.
        linger_s: how long `close` waits for queued bytes.
        greeting_s: how long it may take to connect with a peer, attempts that it hung up on included.
        max_bytes: the most bytes of the tensors that the worker here registers. It also limits the memory that the server here
            may need for all tensors: what it keeps, and packets in flight.
        is_local: all members are on one host.
        hosts: for each worker a number that is equal for those of one host; empty before they have met.
        ranks: numbers of the workers in the whole job, for errors; None if they are the same.
    """

    world: int
    servers: int
    rank: int | None
    server: int | None
    job: int = 0
    generation: int = 0
    fingerprint: bytes = bytes(32)
    secret: bytes = field(default=b"", repr=False)
    address: str = "127.0.0.1"
    port: int = 0
    packet_bytes: int = 30 << 10
    rank_order: bool = False
    checksum: bool = True
    deal_evenly: bool = False
    tell_tables: bool = False
    lanes: tuple[WireLane, ...] = (WireLane(),)
    unsent_bytes: int = 64 << 10
    send_buffer_bytes: int = 0
    congestion: str = ""
    ping_s: float = 0.5
    dead_s: float = 2.5
    linger_s: float = 2.0
    greeting_s: float = 5.0
    max_bytes: int = 1 << 40
    is_local: bool = False
    hosts: tuple[int, ...] = ()
    ranks: tuple[int, ...] | None = None

    @property
    def numbering(self) -> str:
        """The end of an error message that names workers or servers of a part of a job."""
        if self.ranks is None or self.ranks == tuple(range(self.world)):
            return ""
        return f" (numbers 0 to {self.world - 1} of the process group of ranks {', '.join(map(str, self.ranks))})"


class ExchangePart(NamedTuple):
    """What a worker sends to `rank` in an exchange, and what it receives from it: dtypes as in `DTYPES`, memory and bytes."""

    rank: int
    from_dtype: int
    from_address: int
    from_bytes: int
    into_dtype: int
    into_address: int
    into_bytes: int


def _close(native: NativeNode, pid: int) -> None:
    if os.getpid() == pid:
        native.close()


class Node:
    """A started node; `close()` or leaving a `with` block ends it.

    Raises:
        InputError: an option is not usable.
        CommunicationError: the node could not start.
    """

    def __init__(self, options: NodeOptions) -> None:
        self.options = options
        self._dialled: dict[str, str] = {}  # by server as in error messages: where it was said to be
        try:
            self._native = start_node(
                rank=-1 if options.rank is None else options.rank,
                server=-1 if options.server is None else options.server,
                world=options.world,
                servers=options.servers,
                job=options.job,
                generation=options.generation,
                fingerprint=options.fingerprint,
                secret=options.secret,
                address=options.address,
                port=options.port,
                packet_bytes=options.packet_bytes,
                rank_order=options.rank_order,
                checksum=options.checksum,
                deal_evenly=options.deal_evenly,
                tell_tables=options.tell_tables,
                marks=[(lane.dscp, lane.socket_priority) for lane in options.lanes],
                unsent_bytes=options.unsent_bytes,
                send_buffer_bytes=options.send_buffer_bytes,
                congestion=options.congestion,
                ping_ms=round(options.ping_s * 1000),
                dead_ms=round(options.dead_s * 1000),
                linger_ms=round(options.linger_s * 1000),
                greeting_ms=min(round(options.greeting_s * 1000), _MOST_MS),
                max_bytes=options.max_bytes,
            )
        except RuntimeError as error:
            code, _, text = str(error).partition(":")
            kind = CommunicationError if code == "12" else InputError
            raise kind(f"transport: {text}") from None
        spare_in_child(self)
        # runs at the interpreter's exit too, so that queued bytes are still sent
        self._ended = weakref.finalize(self, _close, self._native, os.getpid())

    @property
    def native(self) -> NativeNode:
        """The node in native code, for the modules of this package."""
        return self._native

    @property
    def port(self) -> int:
        """The port that this node's server listens on; 0 without a server."""
        return self._native.port()

    def dial(self, server: int, address: str, port: int) -> None:
        """Connect the worker to `server` in another process, with one connection for each lane."""
        self._dialled[f"server {server}"] = f" at {address}:{port}"
        self._native.dial(server, address, port)

    def join(self, timeout_s: float) -> None:
        """Return when every connection of this node is open.

        Raises:
            CommunicationError: a peer is missing after `timeout_s`.
            JobError: another failure of the node.
        """
        joined, missing = self._native.join(round(timeout_s * 1000))
        if not joined:
            self.check()
            named = ", ".join(peer + self._dialled.get(peer, "") for peer in missing.split(", "))
            here = "" if self.options.server is None else f" (this process listens on {self.options.address}:{self.port})"
            raise CommunicationError(
                f"transport: no connection with {named or 'the others'} within {timeout_s:.0f} s; did they start, and is "
                f"their address reachable from here?{here}{self.options.numbering}"
            )

    def define(
        self,
        tensor: int,
        address: int,
        size_bytes: int,
        dtype: str,
        *,
        wire: Wire = "packet-fifo",
        priority: int = 0,
        lane: int = 0,
        acknowledged: bool = False,
        sender: int = ALL,
        receiver: int = ALL,
    ) -> None:
        """Register a tensor that is summed in place in every iteration.

        Args:
            tensor: its id; ids count up from 0.
            address, size_bytes, dtype: its memory.
            wire: how its packets travel and return, as in `Plan.wire`.
            priority: 0 is the most urgent.
            lane: index into `NodeOptions.lanes`.
            acknowledged: a push has been sent once the servers have said that they have it.
            sender, receiver: `ALL`, or one worker, with a server beside it that has all packets. Others than the sender push
                to say that they receive. A sum for one receiver is done on the others when their part is sent.
        """
        self._native.define(
            tensor,
            address,
            address,
            size_bytes,
            DTYPES[dtype],
            sender=sender,
            receiver=receiver,
            at=max(sender, receiver),
            whole=returns_whole(wire),
            urgent_first=wire == "packet-priority",
            urgent_sums=wire == "pull-priority",
            priority=priority,
            lane=lane,
            acknowledged=acknowledged,
        )

    def define_updated(
        self,
        tensor: int,
        address: int,
        size_bytes: int,
        rule: Rule,
        *,
        staleness: int,
        group: int,
        wire: Wire = "packet-priority",
        priority: int = 0,
        acknowledged: bool = False,
    ) -> None:
        """Register a float32 tensor whose parameters the servers keep and update.

        Workers push gradients from its memory and receive parameters in it. The first push sends
        initial parameters; rank 0's count.

        Args:
            tensor, address, size_bytes, priority, acknowledged: as `define`.
            wire: as in `Plan.wire`, but that servers return each packet as soon as it is updated.
            rule: the optimizer, which decides what servers store; its numbers are set for the whole
                `group`.
            staleness: 0: a server sums an iteration's gradients and updates once. k: it updates with each gradient as it comes.
                It answers a push when every worker has made the push k before it. `UNBOUNDED`: it waits for nobody.
            group: number of the parameter group, for `set_rule`.

        A server that lacks memory fails with `CapacityError`.
        """
        self._native.define(
            tensor,
            address,
            address,
            size_bytes,
            DTYPES["float32"],
            urgent_first=wire == "packet-priority",
            urgent_sums=wire == "pull-priority",
            priority=priority,
            acknowledged=acknowledged,
            update=rule.kind,
            staleness=staleness,
            group=group,
        )

    def set_rule(self, group: int, rule: Rule) -> None:
        """Set the optimizer's numbers for `group`, from this worker's next push on.

        No push of the group may be in flight. With staleness 0, all workers must use the same rule
        in an iteration, or all fail with `MismatchError`.

        Raises:
            InputError: a number is out of range.
        """
        try:
            self._native.set_rule(group, rule.kind, **rule.numbers())
        except ValueError as error:
            raise InputError(f"{rule}: {error}") from None

    def push(
        self, tensor: int, notify: bool = True, notify_sent: bool = False, quiet: bool = False, held: bool = False
    ) -> None:
        """Send this worker's part of the next iteration of `tensor`; its memory must not change
        until the end.

        Args:
            tensor: its id.
            notify: `take` reports the end.
            notify_sent: `take` also reports when the kernel has all bytes.
            quiet: send no gradient, only receive parameters (tensors that servers update).
            held: this process's server keeps its sums until `release` (a reduce-scatter now, an
                all-gather later).
        """
        self._native.push(tensor, notify, notify_sent, _QUIET if quiet else 0, held)

    def release(self, tensor: int) -> None:
        """Start the second phase of a `held` push: this process's server returns its sums."""
        self._native.release(tensor)

    def fetch(self, tensor: int, part: Part) -> None:
        """Push without a gradient, and receive `part` of the optimizer's state as float32.

        Counts as an iteration. For "steps", every element is the count.
        """
        self._native.push(tensor, False, False, _QUIET | PARTS[part] << _PART_AT)

    def place(self, tensor: int, part: Part) -> None:
        """Push rank 0's memory into `part` of the optimizer's state; other ranks' memory is
        ignored.

        Receives `part`: rank 0's, if its push came earlier.
        """
        self._native.push(tensor, False, False, _PLACE | PARTS[part] << _PART_AT)

    def start(
        self,
        tensor: int,
        from_address: int,
        into_address: int,
        size_bytes: int,
        dtype: str,
        *,
        op: str = "sum",
        sender: int = ALL,
        receiver: int = ALL,
        at: int = SHARDED,
        urgent_first: bool = False,
        priority: int = 0,
        notify: bool = False,
        of_bytes: int = 0,
    ) -> None:
        """Register a tensor for one iteration and push it. Ids count up, equal on all ranks.

        of_bytes: size of the tensor that this is a piece of, which ranks compare too; 0: it is no piece.
        """
        self._native.start(
            tensor,
            from_address,
            into_address,
            size_bytes,
            DTYPES[dtype],
            op=OPS[op],
            sender=sender,
            receiver=receiver,
            at=at,
            urgent_first=urgent_first,
            priority=priority,
            notify=notify,
            of_bytes=of_bytes,
        )

    def exchange(self, tensor: int, parts: Sequence[ExchangePart], priority: int) -> None:
        """Send every other worker a part and receive one from each, as one tensor: `wait` and `is_done` take its id.

        Parts go straight from worker to worker, as messages. Parts of other sizes or dtypes than the other worker's fail
        the job with `MismatchError`.

        Args:
            tensor: its id; ids count up together with those of `start`, equal on all ranks.
            parts: one for every other worker.
            priority: 0 is the most urgent.
        """
        self._native.exchange(tensor, priority, list(parts))

    def forget_below(self, tensor: int) -> None:
        """Forget all tensors with smaller ids; none may be in flight."""
        self._native.forget_below(tensor)

    def wait(self, tensor: int, timeout_s: float) -> None:
        """Return when `tensor` holds its sum.

        Raises:
            CommunicationError: after `timeout_s`; this ends the job, as `abort` does.
            JobError: the node's failure.
        """
        if not self._native.wait(tensor, max(0, round(timeout_s * 1000))):
            self.check()
            text = _timed_out(timeout_s, f"the end of tensor {tensor}")
            self.abort(text)  # or the sum could still be written to memory that the caller uses for something else
            raise CommunicationError(text)

    def is_done(self, tensor: int) -> bool:
        """Whether `tensor` holds its sum, without waiting."""
        return self._native.is_done(tensor)

    def send(self, rank: int, tag: int, address: int, size_bytes: int, priority: int) -> Transfer:
        """Send a message to worker `rank`. Both processes must have the servers of their workers' numbers.

        Args:
            rank: another worker.
            tag: 0 to 2^32 - 1.
            address, size_bytes: memory that must not change until the transfer is over: all of it is in the kernel then.
            priority: 0 is the most urgent. Of messages to one rank with one tag, a later one is never more urgent.
        """
        return self._native.send(rank, tag, priority, address, size_bytes)

    def receive(self, source: int, tag: int, address: int, size_bytes: int) -> Transfer:
        """Receive the next message with `tag` from worker `source`, or from `ANYONE`.

        One of another size than `size_bytes` fails the job with `MismatchError`.
        """
        return self._native.receive(source, tag, address, size_bytes)

    def wait_for(self, transfer: Transfer, timeout_s: float, what: str) -> None:
        """Return when `transfer` is over.

        Raises:
            CommunicationError: after `timeout_s`; `what` says in its text what was waited for.
            JobError: the node's failure.
        """
        if not self._native.wait_for(transfer, max(0, round(timeout_s * 1000))):
            self.check()
            raise CommunicationError(_timed_out(timeout_s, what))

    def is_over(self, transfer: Transfer) -> tuple[bool, int]:
        """Whether `transfer` is over, and the other worker; `ANYONE` while that is not known."""
        return self._native.is_over(transfer)

    def take(self, timeout_s: float) -> list[int]:
        """Tensors pushed with `notify` that ended since the last call; waits for the first.

        Returns:
            Ids; `~id` for a tensor pushed with `notify_sent` that has been sent. Empty after
            `timeout_s`, or when closed.

        Raises:
            JobError: the node's failure, after everything that ended before it was returned.
        """
        done = self._native.take(max(0, round(timeout_s * 1000)))
        if not done:
            self.check()
        return done

    def await_goodbyes(self, timeout_s: float) -> bool:
        """For a server in a process of its own: whether all workers left in order within
        `timeout_s`.

        Raises:
            JobError: the node's failure.
        """
        if self._native.await_goodbyes(max(0, round(timeout_s * 1000))):
            return True
        self.check()
        return False

    def abort(self, text: str) -> None:
        """Make every process of the job fail with `text`. On return, this node has failed."""
        self._native.abort(text)

    def failure(self) -> JobError | None:
        """What ended this node's work, or None."""
        code, rank, server, text = self._native.failure()
        if code == 0:
            return None
        # a server inside a worker's process has that worker's rank
        peer = rank if rank >= 0 else None if self.options.tell_tables else server
        if peer is not None and peer >= 0 and self.options.ranks is not None:
            peer = self.options.ranks[peer]
        return _as_error(code, peer, text + self.options.numbering)

    def check(self) -> None:
        """Raise the failure, if there is one."""
        failure = self.failure()
        if failure is not None:
            raise failure

    def stats(self) -> dict[str, int]:
        """Bytes and packets sent and received, packet buffers held now and at most, connections
        refused.
        """
        return self._native.stats()

    def close(self) -> None:
        """Send what is queued, say goodbye, end the thread. Does nothing in a forked child."""
        self._ended()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _timed_out(timeout_s: float, what: str) -> str:
    return f"transport: Timed out waiting {timeout_s * 1000:.0f}ms for {what}; is another rank slow?"


def _as_error(code: int, peer: int | None, text: str) -> JobError:
    text = f"transport: {text.removeprefix('transport: ')}"  # another process may have raised it first
    if code in (_DIED, _LEFT):
        return PeerDied(text, peer)
    if code == _STALLED:
        return PeerStalled(text, peer)
    if code == _ABORTED:
        return PeerFailed(text, peer)
    if code in (_MISMATCH, _DUPLICATE):
        return MismatchError(text)
    if code == _AUTH:
        return AuthError(text)
    if code == _CORRUPT:
        return CorruptError(text)
    if code == _FULL:
        return CapacityError(text)
    return CommunicationError(text)
