"""Pieces: the tensors of a node in which the messages of a plan travel.

A message is one tensor. Where several hosts first sum within each host and then exchange their sums, it is cut into pieces:
while one crosses the network, the next is summed within the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradlane.core.plan import Plan
from gradlane.live.backends.gradient_buffers import dtype_name
from gradlane.transport import Node


class Pieces:
    """Defines the tensors of a plan's messages.

    Args:
        node: on which no tensor of an earlier plan is in flight.
        first: the id of the first tensor.
        plan: the same on every rank.
        memory: of each message, which stays where it is until the node forgets its tensors.
        weight: connections per lane, over which a lane's messages are dealt.
        most_bytes: of a piece; None: messages are not cut.

    Attributes:
        counts: of how many tensors each message is.
        end: the first id behind those of the plan.
    """

    def __init__(
        self, node: Node, first: int, plan: Plan, memory: Sequence[torch.Tensor], weight: int, most_bytes: int | None
    ) -> None:
        self._node, self._two_phase = node, [message.two_phase for message in plan.messages]
        self._tensors: list[range] = []
        self._message_of: dict[int, int] = {}
        self.end = first
        for index, (message, part) in enumerate(zip(plan.messages, memory, strict=True)):
            begin, address = self.end, part.data_ptr()
            for size_bytes in cut(part, most_bytes):
                node.define(
                    self.end,
                    address,
                    size_bytes,
                    dtype_name(part),
                    wire=plan.wire,
                    priority=message.priority,
                    lane=message.lane + len(plan.lanes) * (index % weight),
                )
                self._message_of[self.end] = index
                address += size_bytes
                self.end += 1
            self._tensors.append(range(begin, self.end))
        self.counts = [len(tensors) for tensors in self._tensors]

    def message_of(self, tensor: int) -> int:
        """The message that `tensor` is a piece of."""
        return self._message_of[tensor]

    def push(self, message: int) -> None:
        """Hand over all of `message`; the node tells of each piece when it is sent and when it is done."""
        for tensor in self._tensors[message]:
            self._node.push(tensor, notify_sent=True, held=self._two_phase[message])

    def release(self, message: int) -> None:
        """Begin the second phase of a two-phase message."""
        for tensor in self._tensors[message]:
            self._node.release(tensor)


def cut(part: torch.Tensor, most_bytes: int | None) -> list[int]:
    """Bytes of the pieces of a message in `part`: of one where `most_bytes` is None."""
    size_bytes = part.numel() * part.element_size()
    most = most_bytes or size_bytes
    return [min(most, size_bytes - begin) for begin in range(0, size_bytes, most)]
