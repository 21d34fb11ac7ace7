"""Node: one process's part in the data plane, with the native module's codes turned into typed errors.

It holds no memory: who registers a tensor keeps it alive until it is forgotten or done. Every wait ends within
its timeout, in a result or in an error of `gradlane.errors`; the first failure stands and is raised by every
later call. All methods may be called by any thread; those that wait release the GIL.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import dataclass, field

from gradlane._native import Node as NativeNode
from gradlane._native import start_node
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
from gradlane.transport.rules import PARTS, Part, Rule

ALL = -1
"""`sender`: every worker contributes. `receiver`: every worker gets the result."""
SHARDED = -1
"""`at`: a tensor's packets are dealt to all servers."""

DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3, "int8": 4, "uint8": 5, "int32": 6, "int64": 7}
OPS = {"sum": 0, "min": 1, "max": 2, "product": 3}

_DIED, _STALLED, _ABORTED, _LEFT, _MISMATCH, _AUTH, _DUPLICATE, _CORRUPT = 1, 2, 3, 4, 5, 6, 7, 8
_FULL = 11
_QUIET, _PLACE, _PART_AT = 2, 4, 3  # flags of a push


@dataclass(frozen=True)
class WireLane:
    """How the packets of a lane are marked, both ways: DSCP (0-63) and SO_PRIORITY (0-6 without privilege)."""

    dscp: int = 0
    socket_priority: int = 0


@dataclass(frozen=True)
class NodeOptions:
    """What a node is and how it sends. `rank` None: no worker here; `server` None: no server here.

    secret: proves that a process belongs to the job; needed wherever a server listens off loopback.
    fingerprint: 32 bytes, a digest of everything that must agree before step 1. deal_evenly: cut each tensor evenly
    over the servers (tensors that come one at a time) rather than the table as a whole. tell_tables: servers live in
    processes without a worker and are told of each tensor. rank_order: add contributions in rank order, whatever
    order they arrive in: the same bits whatever the schedule. unsent_bytes: how much the kernel may hold that
    is not on its way yet; the smaller, the later the choice of the next packet.
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
    max_bytes: int = 1 << 40


_started: weakref.WeakSet[Node] = weakref.WeakSet()


def _keep_in_child() -> None:
    """A forked child has the nodes without their threads, and with locks as they were: no destructor may touch them."""
    for node in _started:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(node._native))


os.register_at_fork(after_in_child=_keep_in_child)


def _close(native: NativeNode, pid: int) -> None:
    if os.getpid() == pid:
        native.close()


class Node:
    """A started node; `close()` (or leaving a `with` block) ends it. Raises `InputError` or `CommunicationError`."""

    def __init__(self, options: NodeOptions) -> None:
        self.options = options
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
                max_bytes=options.max_bytes,
            )
        except RuntimeError as error:
            code, _, text = str(error).partition(":")
            kind = CommunicationError if code == "12" else InputError
            raise kind(f"transport: {text}") from None
        _started.add(self)
        # also at the interpreter's exit, so that what others wait for still leaves
        self._ended = weakref.finalize(self, _close, self._native, os.getpid())

    @property
    def port(self) -> int:
        """The port that this node's server listens on; 0 where there is none."""
        return self._native.port()

    def dial(self, server: int, address: str, port: int) -> None:
        """Connect the worker to server `server` in another process, one connection a lane."""
        self._native.dial(server, address, port)

    def join(self, timeout_s: float) -> None:
        """Return when every connection of this node is open. Raises what went wrong, or who is missing."""
        joined, missing = self._native.join(round(timeout_s * 1000))
        if not joined:
            self.check()
            raise CommunicationError(
                f"transport: no connection with {missing or 'the others'} within {timeout_s:.0f} s; did they start, and is "
                "their address reachable from here?"
            )

    def define(
        self,
        tensor: int,
        address: int,
        size_bytes: int,
        dtype: str,
        *,
        whole: bool = False,
        urgent_first: bool = False,
        priority: int = 0,
        lane: int = 0,
    ) -> None:
        """Register a tensor that is summed in place, iteration after iteration. Ids grow by one from 0.

        whole: servers return what they have of it at once. urgent_first: packets go by priority (0 first).
        """
        self._native.define(
            tensor,
            address,
            address,
            size_bytes,
            DTYPES[dtype],
            whole=whole,
            urgent_first=urgent_first,
            priority=priority,
            lane=lane,
        )

    def define_updated(
        self, tensor: int, address: int, size_bytes: int, rule: Rule, *, staleness: int, group: int, priority: int = 0
    ) -> None:
        """Register a float32 tensor whose parameters servers keep. Its memory takes gradients there and parameters back.

        The first push brings the parameters' first values, and rank 0's are taken; each later one brings a gradient,
        and ends with parameters in its place. `rule` says what servers have to keep; the numbers are `set_rule`'s, for
        the whole `group`. staleness: 0 sums an iteration's gradients and updates once; k updates by each gradient as it
        comes, and ends a push when every worker has made the push k before it; `UNBOUNDED` waits for nobody. Packets
        go by priority (0 first). A server without the memory fails with `CapacityError`.
        """
        self._native.define(
            tensor,
            address,
            address,
            size_bytes,
            DTYPES["float32"],
            urgent_first=True,
            priority=priority,
            update=rule.kind,
            staleness=staleness,
            group=group,
        )

    def set_rule(self, group: int, rule: Rule) -> None:
        """How this worker's gradients update the tensors of `group` from its next push on; none may be under way.

        With staleness 0 all workers must have the same rule in an iteration, or all fail with `MismatchError`.
        Raises `InputError` for numbers that no optimizer has.
        """
        try:
            self._native.set_rule(group, rule.kind, **rule.numbers())
        except ValueError as error:
            raise InputError(f"{rule}: {error}") from None

    def push(
        self, tensor: int, notify: bool = True, notify_sent: bool = False, quiet: bool = False, held: bool = False
    ) -> None:
        """This worker's part of the next iteration of `tensor` is in its memory, which is not to be touched now.

        `take` tells its end, with `notify`, and before that, with `notify_sent`, that the kernel has all of it.
        quiet: of a tensor that servers update: there is no gradient this time, only parameters to come.
        held: where this process has a server too: it keeps what it sums of the tensor until `release`, without which
        there is no end (a reduce-scatter now, an all-gather later).
        """
        self._native.push(tensor, notify, notify_sent, _QUIET if quiet else 0, held)

    def release(self, tensor: int) -> None:
        """The second half of a push that was `held`: this process's server may return its sums."""
        self._native.release(tensor)

    def fetch(self, tensor: int, part: Part) -> None:
        """A push without a gradient, of a tensor that servers update, that ends with `part` in its memory, as float32.

        It counts as an iteration, as any push does. Of "steps" every element is the count.
        """
        self._native.push(tensor, False, False, _QUIET | PARTS[part] << _PART_AT)

    def place(self, tensor: int, part: Part) -> None:
        """A push without a gradient: what rank 0 has in the tensor's memory becomes its `part`; what others have, nothing.

        It ends with `part` in the memory: rank 0's, if its push came before.
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
    ) -> None:
        """Register a tensor for one iteration and hand it over. Ids grow by one, the same on all ranks."""
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
        )

    def forget_below(self, tensor: int) -> None:
        """Every tensor with a smaller id is over; none of them may be under way."""
        self._native.forget_below(tensor)

    def wait(self, tensor: int, timeout_s: float) -> None:
        """Return when `tensor` holds its sum. Raises the failure, or `CommunicationError` after `timeout_s`."""
        if not self._native.wait(tensor, max(0, round(timeout_s * 1000))):
            self.check()
            raise CommunicationError(f"transport: no end of tensor {tensor} within {timeout_s:.0f} s; is another rank slow?")

    def is_done(self, tensor: int) -> bool:
        """Whether `tensor` holds its sum, without waiting."""
        return self._native.is_done(tensor)

    def take(self, timeout_s: float) -> list[int]:
        """Tensors pushed with `notify` that are done since the last call; waits for one. Empty: timeout or closed.

        Of a tensor pushed with `notify_sent`, `~tensor` says that it has been sent, and comes before its end.
        Raises the failure of the node once everything that was done before it has been taken.
        """
        done = self._native.take(max(0, round(timeout_s * 1000)))
        if not done:
            self.check()
        return done

    def await_goodbyes(self, timeout_s: float) -> bool:
        """Of a server in a process of its own: whether all workers have left in order within `timeout_s`.

        Raises the failure of the node if there is one.
        """
        if self._native.await_goodbyes(max(0, round(timeout_s * 1000))):
            return True
        self.check()
        return False

    def abort(self, text: str) -> None:
        """This process cannot go on: every other one hears `text` and fails."""
        self._native.abort(text)

    def failure(self) -> JobError | None:
        """What ended this node's work, or None."""
        code, rank, server, text = self._native.failure()
        if code == 0:
            return None
        # a server inside a worker's process has that worker's rank
        return _as_error(code, rank if rank >= 0 else None if self.options.tell_tables else server, text)

    def check(self) -> None:
        """Raise the failure, if there is one."""
        failure = self.failure()
        if failure is not None:
            raise failure

    def stats(self) -> dict[str, int]:
        """Bytes and packets sent and received, bytes of packet buffers held now and at most, connections refused."""
        return self._native.stats()

    def close(self) -> None:
        """Send what is queued, say goodbye, end the thread. In a forked child: nothing, the thread is not here."""
        self._ended()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_error(code: int, peer: int | None, text: str) -> JobError:
    text = f"transport: {text}"
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
