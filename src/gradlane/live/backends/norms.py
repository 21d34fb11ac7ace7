"""Norms: what owners tell of their sums, while the sums are on their way to the other ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from msgspec import UNSET

from gradlane.core.backends import refuse_owners_beyond
from gradlane.core.plan import Ownership, Plan
from gradlane.live.backends.gradient_buffers import MessageBuffer
from gradlane.live.backends.process_groups import OnEnd

if TYPE_CHECKING:
    from gradlane.live.backends.base import OnDone

NORMS_ARE_OF_THE_CPU = (
    "owners compute norms in CPU memory, with other kernels than a device has; expected a model on the CPU, or another policy"
)


class Norms:
    """The norms of one iteration's sums, on all ranks, once every first phase has ended.

    Each owner computes those of its tensors, with torch's own kernel and from the whole tensor, so that they have the
    bits of norms that the script would compute. A sum of the ranks' norms brings them to all: only the owner adds another
    number than zero.

    Threads: what `once_there` returns is called on any thread, for one message after another or at once; all else on the
    training thread.

    Args:
        plan: whose tensors have owners.
        buffers: the memory of each message.
        rank, world: of this process, and how many there are.
        begin_sum: begins the sum of a tensor over all ranks, in place, and calls what it is given at its end.

    Raises:
        PlanError: an owner is none of the ranks.

    Attributes:
        memory: of what is summed; it stays.
        threads: with how many threads of torch's this rank computes norms, those of the training thread at the beginning of
            the iteration: the bits of some orders depend on it.
    """

    def __init__(
        self,
        plan: Plan,
        buffers: Sequence[MessageBuffer],
        rank: int,
        world: int,
        begin_sum: Callable[[torch.Tensor, OnEnd], None],
    ) -> None:
        owners = owners_of(plan)
        refuse_owners_beyond(plan, world)
        slot_of = {
            tensor: slot
            for message, buffer in zip(plan.messages, buffers, strict=True)
            for tensor, slot in zip(message.tensors, buffer.slots, strict=True)
        }
        self.order = owners.norm
        """As torch has it."""
        self._slots = [slot_of[tensor] for tensor in range(len(plan.tensors))]
        self._owned = [(tensor, self._slots[tensor]) for tensor, owner in enumerate(owners.ranks) if owner == rank]
        self._messages, self._begin_sum = len(plan.messages), begin_sum
        self._lock = threading.Lock()
        self.memory = torch.zeros(len(self._slots), dtype=torch.float64, device="cpu")
        self.begin()

    def begin(self) -> None:
        """An iteration begins."""
        self.threads = torch.get_num_threads()
        self.are_there = False
        self._missing = self._messages

    def of(self, tensor: int) -> torch.Tensor:
        """The norm of a tensor's sum, of its dtype and without dimensions, in memory of its own. `are_there` must be True."""
        return self.memory[tensor].to(self._slots[tensor].dtype, copy=True)

    def once_there(self, on_done: OnDone) -> OnDone:
        """What to call at the ends of first phases, to tell `on_done` of them; of the last one only when the norms are there.

        Second phases follow it. Norms that came behind their bytes would wait in the network's queues.
        """

        def ended(message: int, error: BaseException | None) -> None:
            if error is not None:
                on_done(message, error)
                return
            try:
                self._first_phase_ended(lambda error: on_done(message, error))
            except Exception as raised:  # torch.distributed would drop it
                on_done(message, raised)

        return ended

    def _first_phase_ended(self, then: OnEnd) -> None:
        """The first phase of one more message has ended, and its owned sums are in their slots.

        Args:
            then: called with None or an error: at once, or after the last message when the norms are there.
        """
        with self._lock:
            self._missing -= 1
            is_last = not self._missing
        if is_last:
            self._exchange(then)
        else:
            then(None)

    def _exchange(self, then: OnEnd) -> None:
        self.memory.zero_()
        if torch.get_num_threads() != self.threads:  # each thread has a number of its own, once it has computed anything
            torch.set_num_threads(self.threads)
        for tensor, slot in self._owned:
            self.memory[tensor] = torch.linalg.vector_norm(slot, self.order)

        def ended(error: BaseException | None) -> None:
            self.are_there = error is None
            then(error)

        self._begin_sum(self.memory, ended)


def owners_of(plan: Plan) -> Ownership:
    """The owners of the plan's tensors, which it must have."""
    assert plan.owners is not UNSET
    return plan.owners


def part_lengths(plan: Plan, index: int, buffer: MessageBuffer, world: int) -> list[int]:
    """By rank how much of a two-phase message it owns, in elements of `buffer`, with presence and padding."""
    lengths = [0] * world
    for tensor, length in zip(plan.messages[index].tensors, buffer.lengths, strict=True):
        lengths[owners_of(plan).ranks[tensor]] += length
    return lengths
