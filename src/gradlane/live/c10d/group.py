"""Group: a process group of torch.distributed whose collectives run over gradlane's transport.

Each collective consists of tensors of the node (`gradlane.transport.Node`), which are used once.
Their ids count up and are equal on all ranks, since torch.distributed requires the same calls in
the same order on all ranks. Data to reduce is dealt over the servers in all ranks; other data goes
straight from the rank that has it to those that need it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from gradlane.errors import CommunicationError, InputError, UnsupportedError
from gradlane.live.backends.addresses import own_address, store_address
from gradlane.live.c10d import sparse
from gradlane.live.c10d.messages import Mail
from gradlane.live.c10d.names import Names
from gradlane.live.c10d.options import Options
from gradlane.live.c10d.parts import NUMBERS, Parts, check_alike, chunks_of, contiguous, copied, listed, split
from gradlane.live.c10d.profiling import begin
from gradlane.live.c10d.work import Futures, Work
from gradlane.live.torch_versions import KEEPS_WORKS
from gradlane.transport import ANYONE, Node, NodeOptions
from gradlane.transport.formation import form
from gradlane.transport.host import PIECE_BYTES, share_if_possible

_OPS = {ReduceOp.SUM: "sum", ReduceOp.AVG: "sum", ReduceOp.MIN: "min", ReduceOp.MAX: "max", ReduceOp.PRODUCT: "product"}
# bools are bytes of 0 or 1, and a sum of bools is true if any is: the maximum
_BOOL_OPS = {ReduceOp.SUM: "max", ReduceOp.MIN: "min", ReduceOp.MAX: "max", ReduceOp.PRODUCT: "min"}

# on loopback a packet costs processor time, not link time, so that large packets are faster
_LOCAL_PACKET_BYTES = 512 << 10
# between hosts smaller ones take more processor time; larger ones take no less, and sums wait longer for them
_PACKET_BYTES = 256 << 10
_UNSENT_BYTES = 128 << 10

_thread = threading.local()


def _close(node: Node, futures: Futures) -> None:
    node.close()
    futures.close()


@contextmanager
def priority(level: int) -> Iterator[None]:
    """Collectives that this thread starts within the block go by `level`, 0 first, before all that have none.

    All ranks must give a call the same level. The level is the priority of the order on a connection
    (`gradlane.schedule.wire_order`): equal levels go in order of the calls, and a more urgent call preempts others
    between two packets.

    Args:
        level: 0 (the most urgent) to 65535.

    Raises:
        InputError: another level.
    """
    if not 0 <= level < 1 << 16:
        raise InputError(f"priority: got {level}, expected 0 to 65535")
    before = getattr(_thread, "level", None)
    _thread.level = level
    try:
        yield
    finally:
        _thread.level = before


_Base: Any = dist.ProcessGroup  # torch.distributed calls only one of its stub's overloads


class Group(Names, _Base):  # type: ignore[misc]
    """A process group, made by torch.distributed, whose methods take torch.distributed's arguments.

    Methods raise `InputError` for tensors that are not dense CPU tensors, `UnsupportedError` for an
    operation or dtype that gradlane does not have, and `CommunicationError` once the group is
    closed. The works that they return raise `JobError`s, such as `PeerDied`, `PeerFailed` and
    `MismatchError`.

    Args:
        store: for this group alone.
        rank: of this process in the group.
        world: number of ranks.
        timeout_s: seconds to connect, and for each collective without a timeout of its own.
        options: the same on all ranks.

    Raises:
        JobError: as `transport.formation.form` and `transport.host.share`.
    """

    def __init__(self, store: Any, rank: int, world: int, timeout_s: float, options: Options) -> None:
        super().__init__(rank, world)
        self._rank, self._world, self._timeout_s, self._options = rank, world, timeout_s, options
        self._store = store
        wanted = NodeOptions(
            world=world,
            servers=world,
            rank=rank,
            server=rank,
            fingerprint=options.fingerprint(),
            packet_bytes=options.packet_bytes or _PACKET_BYTES,
            rank_order=options.rank_order,
            checksum=options.checksum,
            deal_evenly=True,
            unsent_bytes=_UNSENT_BYTES,
            dead_s=options.stall_timeout,
        )
        local_bytes = options.packet_bytes or _LOCAL_PACKET_BYTES
        self._node = form(store, wanted, own_address(), timeout_s, local_bytes, store_address())
        shares = share_if_possible(store, self._node, timeout_s, options.shared_memory)
        self._piece_bytes = PIECE_BYTES if shares and not self._node.options.is_local else None
        self._futures = Futures()
        self._works: set[Work] | None = None if KEEPS_WORKS else set()
        self._under_way: deque[tuple[range, list[torch.Tensor]]] = deque()
        self._mail = Mail(self._node, self._futures, rank, world, self._works)
        self._next_id = 0
        self._lock = threading.Lock()
        # also at exit, if the script never destroys the group, and when the last reference to it is
        # gone: before PyTorch 2.7 `destroy_process_group` does not call `shutdown`
        self._close = weakref.finalize(self, _close, self._node, self._futures)

    # -- collectives that reduce --------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        tensors = listed(tensors)
        if tensors[0].layout is torch.sparse_coo:
            return self._allreduce_sparse(tensors, opts)
        part = self._parts()
        for tensor in tensors:
            op, finish_op = self._reduction(tensor.dtype, opts)
            plain = contiguous(tensor)
            part.add(plain, plain, op=op)
            part.deliver(plain, tensor, finish_op)
        return self._work(part, tensors, opts, "all_reduce")

    def _allreduce_sparse(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        if opts is not None and opts.reduceOp.op != ReduceOp.SUM:
            raise UnsupportedError(f"gradlane does not reduce sparse tensors by {opts.reduceOp.op.name}; it has sum")
        if len(tensors) != 1:
            raise InputError(f"all_reduce: got {len(tensors)} sparse tensors, expected one")
        (tensor,) = tensors
        outputs, inputs, summed = sparse.all_reduce(tensor, self._world, self.allgather)
        part = self._parts()
        self._gather_into(part, outputs, inputs)
        part.deliver(tensor, tensor, summed)
        return self._work(part, tensors, opts, "all_reduce")

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> Work:
        tensors = listed(tensors)
        part = self._parts()
        for tensor in tensors:
            op, finish_op = self._reduction(tensor.dtype, opts)
            plain = contiguous(tensor)
            part.add(plain, plain, op=op, receiver=opts.rootRank)
            if opts.rootRank == self._rank:
                part.deliver(plain, tensor, finish_op)
        return self._work(part, tensors, opts, "reduce")

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        outputs = listed(outputs)
        inputs = inputs if inputs and isinstance(inputs[0], list) else [inputs]
        part = self._parts()
        for output, chunks in zip(outputs, inputs, strict=True):
            self._check_parts(chunks, "reduce_scatter: inputs")
            finish_op = self._reduction(output.dtype, opts)[1]
            plain = contiguous(output)
            for rank, chunk in enumerate(chunks):
                if rank == self._rank:
                    check_alike(chunk, output)
                op = self._reduction(chunk.dtype, opts)[0]
                part.add(contiguous(chunk), plain if rank == self._rank else None, op=op, receiver=rank, at=rank)
            part.deliver(plain, output, finish_op)
        return self._work(part, outputs, opts, "reduce_scatter", inputs[0])

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> Work:
        return self.reduce_scatter([output], [chunks_of(given, self._world, output)], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self.reduce_scatter(outputs, [chunks_of(g, self._world, o) for o, g in zip(outputs, inputs, strict=True)], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        token = torch.zeros(1, dtype=torch.int32, device="cpu")
        part = self._parts()
        part.add(token, token)
        return self._work(part, [token], opts, "barrier")

    # -- collectives that only move data -----------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any) -> Work:
        tensors = listed(tensors)
        part = self._parts()
        for tensor in tensors:
            plain = contiguous(tensor)
            mine = opts.rootRank == self._rank
            part.add(plain if mine else None, None if mine else plain, sender=opts.rootRank)
            if not mine:
                part.deliver(plain, tensor)
        return self._work(part, tensors, opts, "broadcast")

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        inputs = listed(inputs)
        outputs = outputs if outputs and isinstance(outputs[0], list) else [outputs]
        part = self._parts()
        self._gather_into(part, outputs, inputs)
        return self._work(part, [chunk for chunks in outputs for chunk in chunks], opts, "all_gather", inputs)

    def _gather_into(self, part: Parts, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> None:
        """Add an all-gather of each of `inputs` into those of `outputs` by rank."""
        for chunks, given in zip(outputs, inputs, strict=True):
            self._check_parts(chunks, "all_gather: outputs")
            for rank, chunk in enumerate(chunks):
                if rank == self._rank:
                    part.add(contiguous(given), None, sender=rank, at=rank)
                    copied(given, chunk)
                else:
                    plain = contiguous(chunk)
                    part.add(None, plain, sender=rank, at=rank)
                    part.deliver(plain, chunk)

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> Work:
        return self.allgather([chunks_of(output, self._world, given)], [given], opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        self._check_parts(outputs, "all_gather_coalesced: outputs")
        return self.allgather([list(chunks) for chunks in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self.allgather([chunks_of(o, self._world, g) for o, g in zip(outputs, inputs, strict=True)], inputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        (given,) = listed(inputs)
        root = opts.rootRank
        chunks: Sequence[torch.Tensor] = outputs[0] if root == self._rank else []
        part = self._parts()
        if root == self._rank:
            self._check_parts(chunks, "gather: outputs")
            copied(given, chunks[root])
        for rank in range(self._world):
            if rank == root:
                continue
            plain = contiguous(chunks[rank]) if root == self._rank else None
            part.add(contiguous(given) if rank == self._rank else None, plain, sender=rank, receiver=root, at=root)
            if plain is not None:
                part.deliver(plain, chunks[rank])
        return self._work(part, list(chunks), opts, "gather", [given])

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        (output,) = listed(outputs)
        root = opts.rootRank
        chunks: Sequence[torch.Tensor] = inputs[0] if root == self._rank else []
        part = self._parts()
        if root == self._rank:
            self._check_parts(chunks, "scatter: inputs")
            copied(chunks[root], output)
        for rank in range(self._world):
            if rank == root:
                continue
            plain = contiguous(output) if rank == self._rank else None
            part.add(contiguous(chunks[rank]) if root == self._rank else None, plain, sender=root, receiver=rank, at=rank)
            if plain is not None:
                part.deliver(plain, output)
        return self._work(part, [output], opts, "scatter", chunks or [output])

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        self._check_parts(outputs, "all_to_all: outputs")
        self._check_parts(inputs, "all_to_all: inputs")
        part = self._parts()
        copied(inputs[self._rank], outputs[self._rank])
        for turn in range(1, self._world):  # each rank begins with another, so that no card is sent to by all at once
            other = (self._rank + turn) % self._world
            plain = contiguous(outputs[other])
            part.exchange(other, contiguous(inputs[other]), plain)
            part.deliver(plain, outputs[other])
        return self._work(part, list(outputs), opts, "all_to_all", list(inputs))

    def all_to_all_single(self, output: Any, given: Any, output_sizes: Any, input_sizes: Any, opts: Any = None) -> Work:
        return self.alltoall(split(output, output_sizes, self._world), split(given, input_sizes, self._world), opts)

    alltoall_base = all_to_all_single

    # -- messages between two ranks ------------------------------------------------------------------------------

    def send(self, tensors: Any, to: int, tag: int = 0) -> Work:
        self._check_open()
        priority = self._options.priority_of(getattr(_thread, "level", None), self._next_id)
        return self._mail.send(tensors, to, tag, priority, self._timeout_s)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Work:
        self._check_open()
        return self._mail.receive(tensors, source, tag, self._timeout_s)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        self._check_open()
        return self._mail.receive(tensors, ANYONE, tag, self._timeout_s)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """See `gradlane.live.c10d.monitored_barrier`."""
        self._check_open()
        self._mail.barrier(self._timeout_s if timeout is None else timeout.total_seconds(), wait_all_ranks)

    # -- life ----------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Send what is queued, leave the group and end the threads. May be called twice."""
        self._close()
        self._under_way.clear()
        self._mail.close()

    def abort(self) -> None:
        """Fail the group on all its ranks, and close it here."""
        self._node.abort(f"rank {self._rank} aborted the process group")
        self.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def get_group_store(self) -> Any:
        return self._store

    # -- inside --------------------------------------------------------------------------------------

    def _parts(self) -> Parts:
        self._check_open()
        return Parts(self._piece_bytes)

    def _check_open(self) -> None:
        if not self._close.alive:
            raise CommunicationError("the process group is closed")

    def _work(
        self, parts: Parts, tensors: list[torch.Tensor], opts: Any, name: str, inputs: Sequence[torch.Tensor] | None = None
    ) -> Work:
        """The work of `parts` once they are started; `name` and `inputs` (`tensors` without) are for profilers."""
        given_s = opts.timeout.total_seconds() if opts is not None else 0.0
        timeout_s = given_s if given_s > 0 else self._timeout_s
        entry = begin(name, tensors if inputs is None else inputs)
        ids = self._start(parts)
        return Work(self._node, self._futures, ids, tensors, parts.held, timeout_s, parts.conclude, self._works, entry)

    def _reduction(self, dtype: torch.dtype, opts: Any) -> tuple[str, Callable[[torch.Tensor], Any] | None]:
        """The node's operation for a reduction of a tensor of `dtype`, and what to call on the result (None for nothing).

        Raises `UnsupportedError` if gradlane does not have it.
        """
        asked = ReduceOp.SUM if opts is None else opts.reduceOp.op
        if dtype not in NUMBERS and dtype is not torch.bool:
            raise UnsupportedError(f"gradlane reduces {', '.join(NUMBERS.values())} and bool, not {dtype}")
        op = (_BOOL_OPS if dtype is torch.bool else _OPS).get(asked)
        if op is None:
            raise UnsupportedError(f"gradlane does not reduce {dtype} by {asked.name}; it has sum, avg, min, max and product")
        if asked != ReduceOp.AVG:
            return op, None
        world = self._world
        if dtype.is_floating_point:
            return op, lambda tensor: tensor.div_(world)
        return op, lambda tensor: tensor.div_(world, rounding_mode="trunc")

    def _check_parts(self, parts: Sequence[torch.Tensor], what: str) -> None:
        if len(parts) != self._world:
            raise InputError(f"{what}: got {len(parts)} tensors, expected one for each of the {self._world} ranks")

    def _start(self, parts: Parts) -> range:
        """Hand `parts` to the node. Returns their ids.

        Their memory is held here until the node no longer uses it, even if the script drops the
        work.
        """
        level = getattr(_thread, "level", None)
        node = self._node
        with self._lock:
            first = self._next_id
            self._next_id = first + len(parts.starts) + bool(parts.exchanged)
            queue_priority = self._options.priority_of(level, first)
            for each, (source, into, size, dtype, op, sender, receiver, at, of_bytes) in enumerate(parts.starts, first):
                node.start(
                    each, source, into, size, dtype,
                    op=op, sender=sender, receiver=receiver, at=at, urgent_first=True, priority=queue_priority,
                    of_bytes=of_bytes,
                )  # fmt: skip
            if parts.exchanged:
                node.exchange(first, parts.exchanged, queue_priority)
            ids = range(first, self._next_id)
            self._under_way.append((ids, parts.held))
            while self._under_way and all(map(node.is_done, self._under_way[0][0])):
                self._under_way.popleft()
        return ids
