"""OwnedPieces: as `Pieces`, for a plan whose tensors have owners.

A two-phase message has a part for each rank: the tensors that the rank owns. Each part is two tensors of the node. The first is
a sum for the owner alone, at the server beside it; it ends on the other ranks when their parts are sent. The second goes from
the owner to all. An owner sends when its own second phase begins. The other ranks say at the beginning of each iteration where
to put what it sends, so that packets which come early go straight to their place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from gradlane.core.plan import Plan, Wire
from gradlane.live.backends.gradient_buffers import MessageBuffer, dtype_name
from gradlane.live.backends.norms import Norms, NormsExchange, part_lengths, scatter_of_others
from gradlane.live.backends.pieces import define
from gradlane.live.backends.process_groups import OnEnd
from gradlane.transport import Node

if TYPE_CHECKING:
    from gradlane.live.backends.base import OnDone, OnSent


@dataclass
class _Phase:
    """One of the two phases of a message, or the only one.

    Attributes:
        scatter: brings its sums into their slots.
        starts: the tensors that this rank hands over when the phase begins.
        listens: those that other ranks send.
        missing: how many of both have not ended in this iteration.
        on_done: to be told of the end; None before the phase begins and after its end.
    """

    scatter: Callable[[], None]
    starts: list[int] = field(default_factory=list)
    listens: list[int] = field(default_factory=list)
    missing: int = 0
    on_done: OnDone | None = None


class OwnedPieces:
    """As `Pieces`, whose arguments and methods it has. Sends are not told.

    Attributes:
        norms: of the plan's sums.
        end: the first id behind those of the plan.

    Raises:
        PlanError: an owner is none of the ranks.
    """

    def __init__(
        self, node: Node, first: int, plan: Plan, buffers: Sequence[MessageBuffer], weight: int, most_bytes: int | None
    ) -> None:
        self._node, self._weight, self._most_bytes = node, weight, most_bytes
        assert node.options.rank is not None
        self._rank, self._world = node.options.rank, node.options.world
        self.norms = Norms(plan, buffers, self._rank, self._world)
        self._exchange = NormsExchange(self.norms, self._sum_norms)
        self._lock = threading.Lock()
        self._buffers = buffers
        self._first = [_Phase(buffer.scatter) for buffer in buffers]
        self._second = {
            index: _Phase(scatter_of_others(plan, index, buffers[index], self._rank, self._world))
            for index in plan.second_phases
        }
        self._phase_of: dict[int, tuple[int, _Phase]] = {}
        self.end = first
        for index, buffer in enumerate(buffers):
            self._define(plan, index, buffer)
        self._tensor_of_norms = self.end
        self._then: OnEnd | None = None  # to be told of the norms' sum, while that is under way
        told = self.norms.memory
        node.define(self.end, told.data_ptr(), told.numel() * told.element_size(), dtype_name(told))
        self.end += 1

    def _define(self, plan: Plan, index: int, buffer: MessageBuffer) -> None:
        """Define the tensors of one message."""
        phase = self._first[index]
        if index not in self._second:
            phase.starts += self._define_part(plan, index, buffer.tensor)
        else:
            parts = torch.split(buffer.tensor, part_lengths(plan, index, buffer, self._world))
            second = self._second[index]
            for owner, part in enumerate(parts):
                phase.starts += self._define_part(plan, index, part, receiver=owner)
                sends = self._define_part(plan, index, part, sender=owner)
                (second.starts if owner == self._rank else second.listens).extend(sends)
            self._phase_of |= dict.fromkeys((*second.starts, *second.listens), (index, second))
        self._phase_of |= dict.fromkeys(phase.starts, (index, phase))

    def _define_part(self, plan: Plan, index: int, part: torch.Tensor, **ends: int) -> range:
        """Define tensors for a part of message `index`, none if it is empty. Returns their ids."""
        # nobody waits for all packets of a part together: each may leave by itself
        wire: Wire = "packet-fifo" if ends and plan.wire == "fifo" else plan.wire
        tensors = define(self._node, self.end, plan, index, part, wire, self._weight, self._most_bytes, **ends)
        self.end = tensors.stop
        return tensors

    def begin(self) -> None:
        """An iteration begins; all of the one before has ended."""
        self.norms.begin()
        for phase in (*self._first, *self._second.values()):
            phase.missing = len(phase.starts) + len(phase.listens)
        for phase in self._second.values():
            for tensor in phase.listens:
                self._node.push(tensor)

    def start(self, message: int, on_done: OnDone, on_sent: OnSent) -> None:
        """Begin the first phase of `message`, or its only one."""
        phase = self._first[message]
        self._buffers[message].gather()
        phase.on_done = self._exchange.once_there(on_done)
        for tensor in phase.starts:
            self._node.push(tensor)

    def start_second(self, message: int, on_done: OnDone) -> bool:
        """Begin the second phase. Returns True if it has ended already: this rank owns nothing, and all owners have sent."""
        phase = self._second[message]
        with self._lock:
            has_ended = not phase.missing
            phase.on_done = None if has_ended else on_done
        if has_ended:
            phase.scatter()
        for tensor in phase.starts:
            self._node.push(tensor)
        return has_ended

    def ended(self, tensor: int) -> None:
        """`tensor` is done: what ends with it is told."""
        if tensor == self._tensor_of_norms:
            self._norms_ended(None)
            return
        message, phase = self._phase_of[tensor]
        with self._lock:
            phase.missing -= 1
            on_done = None if phase.missing else phase.on_done
            if on_done is not None:
                phase.on_done = None
        if on_done is not None:
            phase.scatter()  # of a first phase the own sums; what others own comes again in the second
            on_done(message, None)

    def failed(self, error: BaseException) -> None:
        """Nothing ends any more: tell all that wait."""
        self._norms_ended(error)
        for message, phase in (*enumerate(self._first), *self._second.items()):
            with self._lock:
                on_done, phase.on_done = phase.on_done, None
            if on_done is not None:
                on_done(message, error)

    def _sum_norms(self, norms: torch.Tensor, then: OnEnd) -> None:
        self._then = then
        self._node.push(self._tensor_of_norms)

    def _norms_ended(self, error: BaseException | None) -> None:
        with self._lock:
            then, self._then = self._then, None
        if then is not None:
            then(error)
