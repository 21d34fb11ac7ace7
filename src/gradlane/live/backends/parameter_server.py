"""ParameterServerBackend: sums over gradlane's own transport, on servers in the ranks' processes or
in their own.

Each message of a plan is one tensor of the node (`gradlane.transport.Node`). Every packet names its
tensor, offset and iteration, so ranks may start messages in any order and no order is planned
ahead: windows and priorities decide. A message leaves its lane's window when this rank has sent it,
as in the simulator. If it stayed until its sum is there, ranks whose windows hold different
messages would wait for one another for ever, as a sum needs every rank's part.

If the plan's wire is "fifo" or "pull-priority", a server returns a message once it has summed all of its packets. Otherwise it
returns each packet as soon as that is summed. With "packet-priority" the most urgent packet is sent first, however late it was
queued; with "pull-priority" this holds for the packets that servers return.

If each host has equally many ranks and the servers are beside them, ranks of one host sum through memory that they share
(`transport.host`). Between hosts only the hosts' sums travel. The plan's messages, windows and priorities stay. A message has
left its window when this rank's part is in that memory and its host's sum has been sent. It has also left when it waits for
another rank of the host and nothing else moves: the ranks would wait for one another for ever.

Where the plan's tensors have owners, messages travel as `owned_pieces` says, and a first phase ends with the sums that this
rank owns.

Owns one thread, which blocks in the node until messages have ended and reports them. When the node
fails, the thread reports the failure for every message in flight; the control channel names the
rank that is to blame.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from msgspec import UNSET, structs

from gradlane.core import traffic_class
from gradlane.core.backends import refuse_what_cannot_be_done
from gradlane.core.cluster import Cluster
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.errors import JobError
from gradlane.live.backends.base import Measured, OnDone, OnSent, Sums
from gradlane.live.backends.external_servers import join_servers
from gradlane.live.backends.gradient_buffers import MessageBuffer, dtype_name
from gradlane.live.backends.owned_pieces import OwnedPieces
from gradlane.live.backends.pieces import Pieces, cut
from gradlane.live.backends.probe import QUICK_SIZES, sweep
from gradlane.live.backends.process_groups import NewGroups
from gradlane.live.backends.streams import Event
from gradlane.planning.fit import fit_network
from gradlane.transport import FOR_EVER_S, MessageMemory, Node, NodeEngine, NodeOptions, WireLane
from gradlane.transport.host import PIECE_BYTES, share_if_possible
from gradlane.units import format_bytes

log = logging.getLogger("gradlane")

_STREAM, _IN_FLIGHT = 16, 4  # messages of a stream, and how many of them are on their way at once
# `measure` sends more of small messages, and more at once: each then hides what the others take to come back
_SMALL_BYTES, _STREAM_OF_SMALL, _BYTES_IN_FLIGHT = 4 << 10, 64, 1 << 20
# measures the cost of a message as such, which larger ones hide behind their bytes
_SMALLEST_BYTES = 64


Level = Literal["memory", "network"]


class ServerSums(Sums):
    """The sums of one plan, whose messages are tensors of a node.

    Args:
        node: connected.
        first: id of the node's first tensor for the plan.
        plan: to carry out.
        buffers: of its messages.
        weight: see `ParameterServerBackend`.
        piece_bytes: see `Pieces`.
    """

    needs_one_order = False

    def __init__(
        self, node: Node, first: int, plan: Plan, buffers: Sequence[MessageBuffer], weight: int, piece_bytes: int | None
    ) -> None:
        self._node, self._first, self._plan, self._buffers = node, first, plan, buffers
        kind = Pieces if plan.owners is UNSET else OwnedPieces
        self._pieces = kind(node, first, plan, buffers, weight, piece_bytes)
        self.end, self.norms = self._pieces.end, self._pieces.norms
        self.tells_sends = plan.owners is UNSET  # else a first phase has ended when this rank has the sums that it owns
        self._failure: JobError | None = None
        self._engine: NodeEngine | None = None
        self._on_failure: Callable[[JobError], None] = lambda error: None

    def carry_out(self, keeps_log: bool, on_failure: Callable[[JobError], None]) -> NodeEngine | None:
        """The node starts messages by itself, unless tensors have owners."""
        if not isinstance(self._pieces, Pieces):
            return None
        memory = [MessageMemory(buffer.tensor.data_ptr(), buffer.copied_ranges()) for buffer in self._buffers]
        self._on_failure = on_failure
        self._engine = NodeEngine(self._node, self._plan, memory, self._first, pieces=self._pieces.counts, keeps_log=keeps_log)
        return self._engine

    def begin(self, expected: list[list[int]]) -> None:
        """No order is agreed upon; what has failed between two iterations is reported now."""
        self._report_to_owner()
        self._pieces.begin()

    def start(self, message: int, ready: list[Event], on_done: OnDone, on_sent: OnSent) -> bool:
        """Hand the message to the node. Returns False: the thread reports the end."""
        self._pieces.start(message, on_done, on_sent)
        # the thread may have reported it before this message was in flight
        if self._failure is not None:
            self._pieces.failed(self._failure)
        return False

    def start_second_phase(self, message: int, on_done: OnDone) -> bool:
        """Let this rank's server return its part of the sum, as in an all-gather, or send the sums that this rank owns.
        Returns as `start` does, unless all owners have sent.
        """
        has_ended = self._pieces.start_second(message, on_done)
        if self._failure is not None:
            self._pieces.failed(self._failure)
        return has_ended

    # -- what the node tells, on the backend's thread ------------------------------------------------------

    def ended(self, tensor: int) -> None:
        """The sum of one of the node's tensors is there."""
        self._pieces.ended(tensor)

    def failed(self, error: JobError) -> None:
        """The node has failed: report it for every message in flight."""
        self._failure = error
        self._pieces.failed(error)
        self._report_to_owner()

    def _report_to_owner(self) -> None:
        if self._failure is not None and self._engine is not None and not self._engine.all_arrived:
            self._on_failure(self._failure)


class ParameterServerBackend:
    """A `Backend` over parameter servers; its methods are documented there. All ranks construct it
    with the same arguments.

    Args:
        new_groups: makes process groups over the ranks of the job.
        options: of this rank's node.
        timeout_s: seconds to connect, and for each wait of `measure`.
        servers_store: "host:port" of the store at which external servers meet the job; None for the
            job's own.
        weight: TCP connections per lane and peer; the lane's messages are dealt over them.
        control: a process group of torch.distributed over the same ranks for CPU tensors, which
            somebody else owns; None for one of its own.
        connect_s: seconds to connect at first; None for `timeout_s`.
        dtype: in which most gradients travel, for `measure`.
        shared_memory: sum through the memory of a host where its ranks can share it.

    Raises:
        JobError, UnsupportedError: as `external_servers.join_servers` and `transport.host.share`.
    """

    control_device = torch.device("cpu")
    has_streams = False
    lost: frozenset[int] = frozenset()

    def __init__(
        self,
        new_groups: NewGroups,
        options: NodeOptions,
        timeout_s: float,
        *,
        servers_store: str | None = None,
        weight: int = 1,
        control: Any = None,
        connect_s: float | None = None,
        dtype: torch.dtype = torch.float32,
        shared_memory: bool = True,
    ) -> None:
        self._dtype, self._wants_memory = dtype, shared_memory
        self._owns_control = control is None
        if control is None:
            control = new_groups.make_for_cpu(timeout_s)
        self._control: Any = control
        self._store, self._servers_store = new_groups.store, servers_store
        self._options, self._timeout_s, self._weight = options, timeout_s, weight
        self._formations = 0
        self._sums: ServerSums | None = None  # of the plan in force
        self._failure: JobError | None = None
        self._open(self._options.lanes, connect_s or timeout_s)

    # -- the node and its thread ---------------------------------------------------------------------------

    def _open(self, lanes: tuple[WireLane, ...], connect_s: float) -> None:
        prefix = dist.distributed_c10d.PrefixStore(f"node/{self._formations}", self._store)
        self._formations += 1
        self._lanes = lanes
        options = replace(self._options, lanes=lanes)
        self._node = join_servers(prefix, options, connect_s, self._servers_store)
        self._shares = not options.tell_tables and share_if_possible(prefix, self._node, connect_s, self._wants_memory)
        self._next = 0  # id of the node's next tensor
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._node, self._ending), name="gradlane-servers", daemon=True)
        self._thread.start()

    def _run(self, node: Node, ending: threading.Event) -> None:
        while not ending.is_set():
            try:
                done = node.take(FOR_EVER_S)
            except JobError as error:
                if not ending.is_set():
                    self._failure = error
                    if self._sums is not None:
                        self._sums.failed(error)
                return
            for tensor in done:
                assert self._sums is not None  # a plan's; a node may be closed before it has one
                self._sums.ended(tensor)

    def _shut(self) -> None:
        self._ending.set()
        self._node.close()
        self._thread.join()

    # -- messages ------------------------------------------------------------------------------------------

    @property
    def levels(self) -> tuple[Level, ...]:
        """What a message passes: "memory" where ranks of one host sum through it, and "network" where there are several
        hosts, or connections between the ranks of one.
        """
        if not self._shares:
            return ("network",)
        return ("memory",) if self._node.options.is_local else ("memory", "network")

    @property
    def control_group(self) -> Any:
        """A process group of torch.distributed, used only between iterations."""
        return self._control

    def measure(self) -> Measured:
        """The network of streams of messages (collective)."""
        return Measured({"server": self.measure_streams()}, self.packet_bytes)

    def take_over(self, measured: Measured) -> None:
        """Send packets of the same size."""
        assert measured.packet_bytes is not None
        self.use_packets(measured.packet_bytes)

    def measure_streams(self, budget_s: float = 1.0) -> Network:
        """Measure what messages cost, in streams, where one message returns while the next is sent
        (collective).

        A message alone would make the links look slower than they are: nothing overlaps with its
        way back. The startup time of a message is at least that of a message of 64 bytes.

        Args:
            budget_s: see `probe.sweep`; less of it leaves out the largest messages.
        """
        streams: dict[int, tuple[range, list[torch.Tensor]]] = {}

        def sum_a_stream(data: torch.Tensor) -> None:
            # defined during the first sweep of a size, which is not counted
            if data.nbytes not in streams:
                messages = _STREAM_OF_SMALL if data.nbytes <= _SMALL_BYTES else _STREAM
                in_flight = max(_IN_FLIGHT, min(messages, _BYTES_IN_FLIGHT // data.nbytes))
                parts = [torch.zeros_like(data) for _ in range(in_flight)]
                streams[data.nbytes] = self._define_stream(parts, messages), parts
            self._sum_stream(*streams[data.nbytes])

        sizes = (_SMALLEST_BYTES, *QUICK_SIZES)
        samples = sweep(self._control, self.control_device, sizes, 3, budget_s, sum_a_stream, self._dtype)
        each = [(size_bytes, duration_ns // len(streams[size_bytes][0])) for size_bytes, duration_ns in samples]
        min_message_ns = round(median(duration_ns for size_bytes, duration_ns in each if size_bytes == _SMALLEST_BYTES))
        network = fit_network(
            [sample for sample in each if sample[0] > _SMALLEST_BYTES],
            workers=dist.get_world_size(self._control),
            source="measured at attach, server",
        )
        min_message_ns = max(min_message_ns, network.min_message_ns)
        pieces = tuple(structs.replace(piece, startup_ns=max(piece.startup_ns, min_message_ns)) for piece in network.segments)
        # where servers are fewer than ranks, a rank's own link is taken to be as fast as a server's
        own_link = (
            Cluster.homogeneous(network.workers, self._options.servers, 10**9).as_network().own_link
            if self._options.tell_tables
            else UNSET
        )
        return structs.replace(network, segments=pieces, min_message_ns=0, own_link=own_link)

    @property
    def packet_bytes(self) -> int:
        """The size of packets, in bytes."""
        return self._options.packet_bytes

    def use_packets(self, packet_bytes: int) -> None:
        """Connect anew for packets of that size, a multiple of 64 up to 512 KiB, unless they have it
        (collective). No plan may have been prepared.
        """
        if packet_bytes != self._options.packet_bytes:
            self._options = replace(self._options, packet_bytes=packet_bytes)
            self._shut()
            self._open(self._lanes, self._timeout_s)

    def time_stream(self, size_bytes: int, in_flight: int = _IN_FLIGHT) -> int:
        """Time a stream of 16 messages of `size_bytes`, some of them in flight, on this rank, in ns (collective)."""
        parts = [torch.zeros(size_bytes // self._dtype.itemsize, dtype=self._dtype, device="cpu") for _ in range(in_flight)]
        tensors = self._define_stream(parts, _STREAM)
        start_ns = time.monotonic_ns()
        self._sum_stream(tensors, parts)
        return time.monotonic_ns() - start_ns

    @staticmethod
    def stream_bytes(size_bytes: int) -> int:
        """Bytes of all messages of a stream whose messages have `size_bytes`."""
        return _STREAM * size_bytes

    def _define_stream(self, parts: Sequence[torch.Tensor], messages: int) -> range:
        """The node's tensors of a stream, whose messages take turns at the memory of `parts`."""
        tensors = range(self._next, self._next + messages)
        self._next = tensors.stop
        for place, tensor in enumerate(tensors):
            part = parts[place % len(parts)]
            self._node.define(tensor, part.data_ptr(), part.nbytes, dtype_name(part))
        return tensors

    def _sum_stream(self, tensors: range, parts: Sequence[torch.Tensor]) -> None:
        """Sum the messages of a stream, with as many in flight as `parts`: each begins when the oldest has ended."""
        for tensor in tensors:
            if tensor - len(parts) in tensors:
                self._node.wait(tensor - len(parts), self._timeout_s)
            self._node.push(tensor, notify=False)
        for tensor in tensors[-len(parts) :]:
            self._node.wait(tensor, self._timeout_s)

    def prepare(self, plan: Plan, buffers: Sequence[MessageBuffer]) -> ServerSums:
        """Define each message of `plan` as a tensor of the node; if the lanes differ, connect anew
        (collective).
        """
        refuse_what_cannot_be_done(plan, "server", external=self._options.tell_tables)
        lanes = wire_lanes(plan) * self._weight
        if lanes != self._lanes:
            self._shut()
            self._open(lanes, self._timeout_s)
        if self._options.rank == 0 and "network" in self.levels:
            log.info("gradlane: each server holds at most %s of packets at once", format_bytes(self.most_held_bytes(buffers)))
        self._node.forget_below(self._next)
        self._sums = ServerSums(self._node, self._next, plan, buffers, self._weight, self._piece_bytes)
        self._next = self._sums.end
        if self._failure is not None:  # the node's, while another carrier was in force
            self._sums.failed(self._failure)
        return self._sums

    @property
    def _piece_bytes(self) -> int | None:
        return PIECE_BYTES if self.levels == ("memory", "network") else None

    def most_held_bytes(self, buffers: Sequence[MessageBuffer]) -> int:
        """Most memory, in bytes, that one server holds for the sums of messages in `buffers`.

        With sums in order of arrival it holds one packet for each place of its share; in rank
        order, one for each place and worker. Both double for 16-bit floats of more than two
        workers, which are added in float32. On top come at most 64 MiB of packets for tensors that
        a process has not registered yet.
        """
        options = self._options
        packets = 0
        if "network" not in self.levels:
            return 0
        for buffer in buffers:
            is_wide = options.world > 2 and buffer.tensor.element_size() == 2
            for size_bytes in cut(buffer.tensor, self._piece_bytes):
                packets += (-(-size_bytes // options.packet_bytes // options.servers) + 1) * (1 + is_wide)
        return packets * options.packet_bytes * (options.world if options.rank_order else 1)

    def interrupt(self) -> None:
        """Nothing is on a device: nothing to do."""

    def close(self, failure: JobError | None) -> None:
        """End the node and its thread: after everything queued is sent, or at once if the job has
        failed.
        """
        self._ending.set()
        if failure is not None:
            self._node.abort(str(failure))
        self._shut()
        if failure is None and self._owns_control:
            # at exit the script may already have destroyed all groups
            with contextlib.suppress(ValueError, AssertionError):
                dist.destroy_process_group(self._control)
        self._control = None  # the last reference: this ends its threads


def wire_lanes(plan: Plan) -> tuple[WireLane, ...]:
    """The traffic class of each lane of `plan`; all are the default if every lane has network
    priority 0.
    """
    return tuple(WireLane(*each) for each in traffic_class.traffic_classes(plan))
