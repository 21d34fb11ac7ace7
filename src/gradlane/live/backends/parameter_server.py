"""Servers: the backend over gradlane's own transport, with a server in each rank's process or with servers of their own.

Each message of a plan is one tensor of the node. What arrives carries its tensor, offset and iteration, so that ranks
may hand messages over in any order, and none has to be planned ahead: windows and priorities alone decide. A message
leaves its window when it has been sent, as in the simulator. Its sum needs every other rank's part: ranks whose
windows were full of different messages until the sums came would wait for one another for ever.

A message with the wire "fifo" is a unit, returned by a server once all that the server has of it is summed;
otherwise packet by packet. With "packet-priority" the most urgent packet goes first, whenever it came.

Owns one thread, which sleeps in the node until messages have ended and reports them. A failure of the node is
reported as that of every message under way: who is to blame, the control channel says better.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs

from gradlane.core import traffic_class
from gradlane.core.backends import refuse_what_cannot_be_done
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.errors import JobError
from gradlane.live.backends.addresses import own_address
from gradlane.live.backends.base import OnDone, OnSent
from gradlane.live.backends.external_servers import meet_servers
from gradlane.live.backends.gradient_buffers import MessageBuffer
from gradlane.live.backends.probe import QUICK_SIZES, sweep
from gradlane.live.backends.staging import Staging
from gradlane.live.backends.streams import Event, Streams
from gradlane.planning.fit import fit_network
from gradlane.transport import Node, NodeOptions, WireLane
from gradlane.transport.formation import form
from gradlane.units import format_bytes

log = logging.getLogger("gradlane")

_FOR_EVER_S = 10**6.0
# messages of a stream in which the network is measured, and how many of them are under way at once
_STREAM, _UNDER_WAY = 16, 4
_NEXT_TO_NOTHING = 64  # bytes: in a stream of larger messages, what one costs by itself is hidden behind their bytes


class ParameterServerBackend:
    """Sums of message buffers, over the ranks of `group`, which all construct it alike.

    streams: of the device that the buffers are on; None where that is the CPU. What is on a device goes through CPU memory,
    see `Staging`. store: of this session alone. fingerprint: 32 bytes, a digest of what the ranks agreed on. apart: how many
    servers there are in processes of their own; 0: one in each rank's. servers_store: "host:port" of the store to which
    those come, if it is not the job's. weight: connections a lane and peer, over which its messages are dealt. Raises what
    `form` raises.
    """

    control_device = torch.device("cpu")
    needs_one_order = False
    tells_sends = True

    def __init__(
        self,
        streams: Streams | None,
        group: dist.ProcessGroup | None,
        store: Any,
        timeout_s: float,
        *,
        fingerprint: bytes,
        packet_bytes: int,
        rank_order: bool,
        external: int = 0,
        servers_store: str | None = None,
        weight: int = 1,
    ) -> None:
        ranks = None if group is None else dist.get_process_group_ranks(group)
        only_of_devices = None if streams is None else "gloo"  # the job's own may be NCCL, which has no CPU tensors
        self._control: Any = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend=only_of_devices)
        self._streams, self.has_streams = streams, streams is not None
        self._staging = None if streams is None else Staging(streams)
        self._store, self._timeout_s, self._servers_store = store, timeout_s, servers_store
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        self._options = NodeOptions(
            world=world,
            servers=external or world,
            rank=rank,
            server=None if external else rank,
            tell_tables=external > 0,
            generation=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            fingerprint=fingerprint,
            packet_bytes=packet_bytes,
            rank_order=rank_order,
        )
        self._weight = weight
        self._formations = 0
        self._under_way: dict[int, tuple[MessageBuffer, OnDone, OnSent]] = {}
        self._failure: JobError | None = None
        self._open(self._options.lanes)

    # -- the node and its thread ---------------------------------------------------------------------------

    def _open(self, lanes: tuple[WireLane, ...]) -> None:
        prefix = dist.distributed_c10d.PrefixStore(f"node/{self._formations}", self._store)
        self._formations += 1
        self._lanes = lanes
        options = replace(self._options, lanes=lanes)
        if options.tell_tables:
            self._node = meet_servers(prefix, options, own_address(), self._timeout_s, self._servers_store)
        else:
            self._node = form(prefix, options, own_address(), self._timeout_s)
        self._first = self._next = 0  # tensors of the node: the first of this plan's, and the next to be defined
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._node, self._ending), name="gradlane-servers", daemon=True)
        self._thread.start()

    def _run(self, node: Node, ending: threading.Event) -> None:
        while not ending.is_set():
            try:
                done = node.take(_FOR_EVER_S)
            except JobError as error:
                if not ending.is_set():
                    self._failure = error
                    self._report_failure(error)
                return
            for tensor in done:
                if tensor < 0:
                    message = ~tensor - self._first
                    self._under_way[message][2](message)
                    continue
                message = tensor - self._first
                buffer, on_done, _ = self._under_way.pop(message)
                if self._staging is None:
                    buffer.scatter()
                else:
                    self._staging.bring_up(message, buffer)
                on_done(message, None)

    def _report_failure(self, error: JobError) -> None:
        for message in list(self._under_way):
            taken = self._under_way.pop(message, None)
            if taken is not None:  # or the other thread that is here has reported it
                taken[1](message, error)

    def _shut(self) -> None:
        self._ending.set()
        self._node.close()
        self._thread.join()

    # -- messages ------------------------------------------------------------------------------------------

    @property
    def control_group(self) -> Any:
        """A group of torch.distributed: it is not used while messages are under way."""
        return self._control

    def measure(self) -> Network:
        """As `Backend.measure`, of messages in a stream: what comes back of one passes what goes of the next.

        A message alone cannot hide its way back, and where a stream ends one link waits for another: either would make the
        links look slower than they are. Startup is at least what a message of no bytes costs.
        """
        beside: dict[int, list[torch.Tensor]] = {}

        def sum_a_stream(data: torch.Tensor) -> None:
            if data.numel() not in beside:  # for the first, which is not counted
                beside[data.numel()] = [torch.zeros_like(data) for _ in range(_UNDER_WAY - 1)]
            self._sum_in_turn([data, *beside[data.numel()]])

        samples = sweep(
            self._control, self.control_device, (_NEXT_TO_NOTHING, *QUICK_SIZES), repeats=3, all_reduce=sum_a_stream
        )
        each = [(size_bytes, duration_ns // _STREAM) for size_bytes, duration_ns in samples]
        min_message_ns = round(median(duration_ns for size_bytes, duration_ns in each if size_bytes == _NEXT_TO_NOTHING))
        network = fit_network(
            [sample for sample in each if sample[0] > _NEXT_TO_NOTHING],
            workers=dist.get_world_size(self._control),
            source="measured at attach, server",
        )
        min_message_ns = max(min_message_ns, network.min_message_ns)
        pieces = tuple(structs.replace(piece, startup_ns=max(piece.startup_ns, min_message_ns)) for piece in network.segments)
        return structs.replace(network, segments=pieces, min_message_ns=0)

    def _sum_in_turn(self, parts: Sequence[torch.Tensor]) -> None:
        """A stream of sums, each of which takes the place of the first that was begun."""
        first = self._next
        self._next += _STREAM
        for place in range(_STREAM):
            tensor, part = first + place, parts[place % len(parts)]
            if place >= len(parts):
                self._node.wait(tensor - len(parts), self._timeout_s)
            self._node.define(tensor, part.data_ptr(), part.numel() * part.element_size(), _dtype(part))
            self._node.push(tensor, notify=False)
        for tensor in range(self._next - len(parts), self._next):
            self._node.wait(tensor, self._timeout_s)

    def prepare(self, plan: Plan, buffers: Sequence[MessageBuffer]) -> None:
        """Make each message of `plan` a tensor of the node; a plan with other lanes has new connections made."""
        refuse_what_cannot_be_done(plan, "server", external=self._options.tell_tables)
        self._plan = plan
        lanes = wire_lanes(plan) * self._weight
        if lanes != self._lanes:
            self._shut()
            self._open(lanes)
        if self._options.rank == 0:
            log.info("gradlane: each server holds at most %s of packets at once", format_bytes(self.most_held_bytes(buffers)))
        self._first = self._next
        self._node.forget_below(self._first)
        memory = [buffer.tensor for buffer in buffers] if self._staging is None else self._staging.prepare(buffers)
        for index, (message, part) in enumerate(zip(plan.messages, memory, strict=True)):
            self._node.define(
                self._next,
                part.data_ptr(),
                part.numel() * part.element_size(),
                _dtype(part),
                whole=plan.wire == "fifo",
                urgent_first=plan.wire == "packet-priority",
                priority=message.priority,
                lane=message.lane + len(plan.lanes) * (index % self._weight),
            )
            self._next += 1

    def most_held_bytes(self, buffers: Sequence[MessageBuffer]) -> int:
        """What a server may hold at once of messages in `buffers`: a packet of every place that it has, in order of arrival;
        one of every worker, in rank order; twice that where halves of more than two workers are added in float32.

        Beside that at most 64 MiB of what came before its time.
        """
        options = self._options
        packets = 0
        for buffer in buffers:
            each = -(-buffer.tensor.numel() * buffer.tensor.element_size() // options.packet_bytes)
            is_wide = options.world > 2 and buffer.tensor.element_size() == 2
            packets += (-(-each // options.servers) + 1) * (1 + is_wide)
        return packets * options.packet_bytes * (options.world if options.rank_order else 1)

    def begin(self, expected: list[list[int]]) -> None:
        """No order is agreed upon: nothing to do."""

    def expect(self, message: int) -> None:
        """No order is agreed upon: nothing to do."""

    def so_far(self) -> Event | None:
        return None if self._streams is None else self._streams.so_far()

    def start(self, message: int, buffer: MessageBuffer, ready: list[Event], on_done: OnDone, on_sent: OnSent) -> bool:
        """Hand `buffer` to the node; always False, since the end is told by the thread."""
        self._under_way[message] = buffer, on_done, on_sent
        if self._staging is None:
            buffer.gather()
            self._push(message)
        else:
            self._staging.bring_down(message, buffer, ready, partial(self._brought_down, message))
        return False

    def _push(self, message: int) -> None:
        self._node.push(self._first + message, notify_sent=True, held=self._plan.messages[message].two_phase)
        if self._failure is not None:  # before this message was one of those under way, perhaps
            self._report_failure(self._failure)

    def _brought_down(self, message: int, error: BaseException | None) -> None:
        try:
            if error is not None:
                raise error
            self._push(message)
        except (JobError, RuntimeError) as failure:
            taken = self._under_way.pop(message, None)
            if taken is not None:
                taken[1](message, failure)

    def start_second_phase(self, message: int, buffer: MessageBuffer, on_done: OnDone) -> bool:
        """Let this rank's server return its part of the sum, as in an all-gather; the thread tells the end, as of `start`."""
        self._node.release(self._first + message)
        return False

    def join(self, message: int) -> None:
        """On a device: the script's own stream goes on when the sum of `message` is back there."""
        if self._staging is not None:
            self._staging.join(message)

    def has_ended(self, message: int) -> bool:
        """Whether the sum of `message`, which has ended for the host, is there."""
        return self._staging is None or self._staging.has_ended(message)

    def close(self, failure: JobError | None) -> None:
        """End the node and its thread: after what is queued has left, or at once where the job has failed."""
        self._ending.set()
        if self._staging is not None:
            self._staging.close()
        if failure is not None:
            self._node.abort(str(failure))
        self._shut()
        if failure is None:
            with contextlib.suppress(ValueError, AssertionError):  # at exit the script may have destroyed all groups
                dist.destroy_process_group(self._control)
        self._control = None  # its threads go with the last reference


def wire_lanes(plan: Plan) -> tuple[WireLane, ...]:
    """How each lane of `plan` is marked: not at all where no lane asks for another class than the first."""
    return tuple(WireLane(*each) for each in traffic_class.traffic_classes(plan))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
