"""Messages between two ranks: what `send`, `recv` and their kin return, and the barrier that is made of them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradlane.errors import BarrierError, CommunicationError, InputError, JobError
from gradlane.live.c10d.parts import Parts, contiguous
from gradlane.live.c10d.profiling import begin
from gradlane.live.c10d.work import Futures, Work
from gradlane.transport import ANYONE, Node, Transfer

_TAGS = 1 << 31  # of torch.distributed's calls; those above are for the group itself
_BARRIER = _TAGS  # and those of barriers, which count up from here, so that none takes a token of another
_BARRIERS = 1 << 30  # of them; the node has those above for itself
_SWEEP = 64  # messages among which those that are over are looked for


class Message(Work):
    """A send or a receive in flight. Its arguments are those of `Work`, and the node's `transfer`."""

    def __init__(
        self,
        node: Node,
        futures: Futures,
        transfer: Transfer,
        tensors: list[torch.Tensor],
        parts: Parts,
        timeout_s: float,
        kept: set[Work] | None,
        entry: Any,
    ) -> None:
        super().__init__(node, futures, range(0), tensors, parts.held, timeout_s, parts.conclude, kept, entry)
        self._transfer = transfer

    def is_sent(self) -> bool:
        return self._node.is_over(self._transfer)[0]

    def _source_rank(self) -> int:
        return self._node.is_over(self._transfer)[1]

    source_rank = _source_rank

    def _await(self, timeout_s: float) -> None:
        self._node.wait_for(self._transfer, timeout_s, f"a message of {self._tensors[0].nbytes} bytes")


class Mail:
    """The messages of a group: what its `send`, `recv` and `monitored_barrier` do.

    Args:
        node: of the group.
        futures: complete those of the messages.
        rank, world: of the group.
        kept: see `Work`.
    """

    def __init__(self, node: Node, futures: Futures, rank: int, world: int, kept: set[Work] | None) -> None:
        self._node, self._futures, self._rank, self._world, self._kept = node, futures, rank, world, kept
        self._under_way: list[Message] = []  # holds their memory, even if the script drops them
        self._sweep_at = _SWEEP
        self._barriers = 0

    def send(self, tensors: Any, to: int, tag: int, priority: int, timeout_s: float) -> Message:
        tensor = self._only(tensors, tag, "send", to)
        plain = contiguous(tensor)
        entry = begin("send", tensors)
        transfer = self._node.send(to, tag, plain.data_ptr(), plain.nbytes, priority)
        return self._message(transfer, plain, [tensor], timeout_s, entry)

    def receive(self, tensors: Any, source: int, tag: int, timeout_s: float) -> Message:
        name = "recvAnySource" if source == ANYONE else "recv"
        tensor = self._only(tensors, tag, name, source)
        plain = contiguous(tensor)
        entry = begin(name, tensors)
        transfer = self._node.receive(source, tag, plain.data_ptr(), plain.nbytes)
        return self._message(transfer, plain, [tensor], timeout_s, entry, plain is not tensor)

    def close(self) -> None:
        """Drop the memory of what did not end. Close the node first."""
        self._under_way.clear()

    def _only(self, tensors: Any, tag: int, what: str, peer: int) -> torch.Tensor:
        if len(tensors) != 1:
            raise InputError(f"{what}: got {len(tensors)} tensors, expected one")
        if not 0 <= tag < _TAGS:
            raise InputError(f"{what}: got tag {tag}, expected 0 to {_TAGS - 1}")
        if (not 0 <= peer < self._world or peer == self._rank) and peer != ANYONE:
            raise InputError(f"{what}: got rank {peer}, expected another of the group's {self._world} than {self._rank} itself")
        tensor: torch.Tensor = tensors[0]
        return tensor

    def _message(
        self,
        transfer: Transfer,
        plain: torch.Tensor,
        tensors: list[torch.Tensor],
        timeout_s: float,
        entry: Any,
        copy: bool = False,
    ) -> Message:
        parts = Parts()
        parts.held.append(plain)
        if copy:
            parts.deliver(plain, tensors[0])
        message = Message(self._node, self._futures, transfer, tensors, parts, timeout_s, self._kept, entry)
        self._under_way.append(message)
        if len(self._under_way) >= self._sweep_at:
            self._under_way = [each for each in self._under_way if not each.is_sent()]
            self._sweep_at = _SWEEP + 2 * len(self._under_way)
        return message

    # -- the monitored barrier: each rank tells rank 0 that it is there, and hears when all are -------------------

    def barrier(self, timeout_s: float, wait_all_ranks: bool) -> None:
        """Return when all ranks have called this.

        Raises:
            BarrierError: on rank 0 with the ranks that did not come within `timeout_s`: the first of them, or all with
                `wait_all_ranks`. On the others it says that rank 0 has failed. The group cannot be used any more.
        """
        tag = _BARRIER + self._barriers % _BARRIERS
        self._barriers += 1
        try:
            if self._rank == 0:
                self._watch(tag, timeout_s, wait_all_ranks)
            else:
                self._report(tag, timeout_s)
        except BarrierError as error:
            # of a rank 0 that has waited for nobody nothing is left; else ranks have been told, or not, that all are there
            if (error.ranks or self._rank != 0) and self._node.failure() is None:
                self._node.abort(str(error))
            raise

    def _tell(self, peer: int, tag: int, timeout_s: float) -> Message:
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        return self._message(self._node.send(peer, tag, token.data_ptr(), 1, 0), token, [token], timeout_s, None)

    def _hear(self, peer: int, tag: int, timeout_s: float) -> Message:
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        return self._message(self._node.receive(peer, tag, token.data_ptr(), 1), token, [token], timeout_s, None)

    def _watch(self, tag: int, timeout_s: float, wait_all_ranks: bool) -> None:
        end = time.monotonic() + timeout_s
        awaited = {rank: self._hear(rank, tag, timeout_s) for rank in range(1, self._world)}
        late: list[int] = []
        for rank, token in awaited.items():
            left_s = end - time.monotonic()
            if left_s <= 0 and not late and not token.is_completed():
                raise BarrierError(f"Rank 0 timed out in monitoredBarrier after {timeout_s * 1000:.0f} ms.", ())
            try:
                token._await(max(left_s, 0.0))
            except CommunicationError:
                late.append(rank)
                if not wait_all_ranks:
                    break
        if late:
            named = f"Rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
            raise BarrierError(f"{named} failed to pass monitoredBarrier in {timeout_s * 1000:.0f} ms", tuple(late))
        for answer in [self._tell(rank, tag, timeout_s) for rank in awaited]:
            answer._await(timeout_s)

    def _report(self, tag: int, timeout_s: float) -> None:
        try:
            for token in (self._tell(0, tag, timeout_s), self._hear(0, tag, timeout_s)):
                token._await(2 * timeout_s)  # rank 0 waits for as long, and then says whom it has missed
        except JobError as error:
            raise BarrierError(
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                f"from rank 0. Please check rank 0 logs for faulty rank. Original exception: {error}",
                (),
            ) from error


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """`torch.distributed.monitored_barrier` for a group over gradlane; torch's own refuses every backend but Gloo by name.

    Args:
        group: None for the default group. Ranks that are not in it return at once.
        timeout: a timedelta or seconds; None for the group's.
        wait_all_ranks: rank 0 names all ranks that are missing, not the first one.

    Raises:
        BarrierError: ranks are missing. The group cannot be used any more.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    asked = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    over: Any = dist.group.WORLD if group is None else group
    over.monitored_barrier(asked, wait_all_ranks)
