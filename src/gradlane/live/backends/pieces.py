"""Pieces: the tensors of a node in which the messages of a plan travel.

A message is one tensor. Where several hosts first sum within each host and then exchange their sums, it is cut into pieces:
while one crosses the network, the next is summed within the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradlane.core.plan import Plan, Wire
from gradlane.live.backends.gradient_buffers import MessageBuffer, dtype_name
from gradlane.transport import Node

if TYPE_CHECKING:
    from gradlane.live.backends.base import OnDone, OnSent


@dataclass
class _UnderWay:
    """A message that was started: how many of its pieces have not been sent, and are not done."""

    on_done: OnDone
    on_sent: OnSent
    unsent: int
    undone: int


class Pieces:
    """Carries the messages of one plan over one node.

    Threads: `ended` is called by the thread that takes the node's ends, `failed` by any, all else as in `Backend`.

    Args:
        node: on which no tensor of an earlier plan is in flight.
        first: the id of the first tensor.
        plan: the same on every rank.
        buffers: the memory of each message, which stays where it is until the node forgets its tensors.
        weight: connections per lane, over which a lane's messages are dealt.
        most_bytes: of a piece; None: messages are not cut.

    Attributes:
        counts: of how many tensors each message is.
        end: the first id behind those of the plan.
    """

    norms = None

    def __init__(
        self, node: Node, first: int, plan: Plan, buffers: Sequence[MessageBuffer], weight: int, most_bytes: int | None
    ) -> None:
        self._node, self._buffers = node, buffers
        self._two_phase = [message.two_phase for message in plan.messages]
        self._tensors: list[range] = []
        self.end = first
        for index, buffer in enumerate(buffers):
            self._tensors.append(define(node, self.end, plan, index, buffer.tensor, plan.wire, weight, most_bytes))
            self.end = self._tensors[-1].stop
        self._message_of = {tensor: index for index, tensors in enumerate(self._tensors) for tensor in tensors}
        self.counts = [len(tensors) for tensors in self._tensors]
        self._under_way: dict[int, _UnderWay] = {}

    def begin(self) -> None:
        """An iteration begins: nothing to do."""

    def start(self, message: int, on_done: OnDone, on_sent: OnSent) -> None:
        """Hand over all of `message`, or begin its first phase."""
        count = self.counts[message]
        self._under_way[message] = _UnderWay(on_done, on_sent, count, count)
        self._buffers[message].gather()
        for tensor in self._tensors[message]:
            self._node.push(tensor, notify_sent=True, held=self._two_phase[message])

    def start_second(self, message: int, on_done: OnDone) -> bool:
        """Begin the second phase: this rank's server returns its part of the sum, as in an all-gather. Returns False."""
        for tensor in self._tensors[message]:
            self._node.release(tensor)
        return False

    def ended(self, tensor: int) -> None:
        """What the node tells: `tensor` is done, or `~tensor` has been sent."""
        message = self._message_of[tensor if tensor >= 0 else ~tensor]
        state = self._under_way[message]
        if tensor < 0:
            state.unsent -= 1
            if state.unsent == 0:
                state.on_sent(message)
            return
        state.undone -= 1
        if state.undone > 0:
            return
        del self._under_way[message]
        self._buffers[message].scatter()
        state.on_done(message, None)

    def failed(self, error: BaseException) -> None:
        """Nothing ends any more: tell all that wait."""
        for message in list(self._under_way):
            taken = self._under_way.pop(message, None)
            # otherwise another thread, here at the same time, has told it
            if taken is not None:
                taken.on_done(message, error)


def define(
    node: Node,
    first: int,
    plan: Plan,
    index: int,
    part: torch.Tensor,
    wire: Wire,
    weight: int,
    most_bytes: int | None,
    **ends: int,
) -> range:
    """Define the tensors of a part of a message, none if it is empty.

    Args:
        node, first, plan, weight, most_bytes: as for `Pieces`.
        index: of the message.
        part: its memory.
        wire: in place of the plan's.
        ends: `sender` or `receiver`, as for `Node.define`.

    Returns:
        Their ids.
    """
    message, address, tensor = plan.messages[index], part.data_ptr(), first
    for size_bytes in cut(part, most_bytes) if part.numel() else ():
        node.define(
            tensor,
            address,
            size_bytes,
            dtype_name(part),
            wire=wire,
            priority=message.priority,
            lane=message.lane + len(plan.lanes) * (index % weight),
            acknowledged=plan.acknowledges(message),
            **ends,
        )
        address += size_bytes
        tensor += 1
    return range(first, tensor)


def cut(part: torch.Tensor, most_bytes: int | None) -> list[int]:
    """Bytes of the pieces of a message in `part`: of one where `most_bytes` is None."""
    size_bytes = part.numel() * part.element_size()
    most = most_bytes or size_bytes
    return [min(most, size_bytes - begin) for begin in range(0, size_bytes, most)]
