"""Norms: what owners tell of their sums, while the sums are on their way to the other ranks.

`Norms` has the numbers of one iteration. A script with a GradScaler multiplies its gradients by a factor and then takes norms.
Owners cannot know the factor while the sums are on their way, but it is seldom another than in the iteration before. So they
multiply their sums by the last factor, and tell a second norm and that factor. A rank uses a second norm only if all owners
have told the factor of its own script.

`NormsExchange` computes and sums norms when the host hears that first phases have ended; sums in a device's stream do so in
that stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from msgspec import UNSET

from gradlane.core.backends import refuse_owners_beyond
from gradlane.core.plan import Ownership, Plan
from gradlane.live.backends.gradient_buffers import MessageBuffer
from gradlane.live.backends.norm_kernels import both_norms
from gradlane.live.backends.process_groups import OnEnd
from gradlane.live.backends.staged_norms import StagedNorms

if TYPE_CHECKING:
    from gradlane.live.backends.base import OnDone


class Norms:
    """The norms of one iteration's sums, on all ranks, once every first phase has ended.

    Each owner computes those of its tensors, with torch's own kernel and from the whole tensor, so that they have the
    bits of norms that the script would compute. A sum of the ranks' norms brings them to all: only the owner adds another
    number than zero.

    Threads: any thread calls `phase_ended` and `fill`, one at a time; the training thread calls the rest.

    Args:
        plan: whose tensors have owners.
        buffers: the memory of each message.
        rank, world: of this process, and how many there are.

    Raises:
        PlanError: an owner is none of the ranks.

    Attributes:
        memory: of what is summed, beside the sums: of all tensors a norm and a second norm, and of each rank its factor.
        factor: of the second norms.
        next_factor: what the script has multiplied this iteration's gradients by before it took norms.
        are_there: whether the norms of all ranks have come; in a stream, whether that is queued.
        owned: this rank's tensors.
        order: as torch has it.
        staged: computes norms where the sums are in CPU memory and the gradients on a device; None elsewhere.
        threads: with how many threads of torch's this rank computes norms, those of the training thread at the beginning of
            the iteration: the bits of some orders depend on it.
    """

    def __init__(self, plan: Plan, buffers: Sequence[MessageBuffer], rank: int, world: int) -> None:
        owners = owners_of(plan)
        refuse_owners_beyond(plan, world)
        slot_of = {
            tensor: slot
            for message, buffer in zip(plan.messages, buffers, strict=True)
            for tensor, slot in zip(message.tensors, buffer.slots, strict=True)
        }
        self.order = owners.norm
        self.owned = [tensor for tensor, owner in enumerate(owners.ranks) if owner == rank]
        self.staged: StagedNorms | None = None
        self._dtypes = [slot_of[tensor].dtype for tensor in range(len(plan.tensors))]
        self._slots = [slot_of[tensor] for tensor in self.owned]
        self._messages = len(plan.messages)
        device = buffers[0].tensor.device
        self._rank, self._count = rank, len(plan.tensors)
        self.memory = torch.empty(2 * self._count + world, dtype=torch.float64, device=device)
        self.factor = self.next_factor = 1.0
        self._places = torch.tensor(self.owned, dtype=torch.int64, device=device)
        self.begin()

    def begin(self) -> None:
        """An iteration begins."""
        self.threads = torch.get_num_threads()
        self.factor, self.next_factor = self.next_factor, 1.0
        self.are_there = False
        self._missing = self._messages

    def phase_ended(self) -> bool:
        """One more first phase has ended, or is queued in the stream of `fill`. Returns whether it was the last."""
        self._missing -= 1
        return not self._missing

    def fill(self, computed: torch.Tensor | None = None) -> None:
        """Put this rank's norms in the memory, and zeros for the others.

        Args:
            computed: both norms of the owned sums, see `both_norms`. None: compute them from the slots.
        """
        self.memory.zero_()
        if self.owned:
            norms = both_norms(self._slots, self.order, self.factor) if computed is None else computed
            self.memory[: 2 * self._count].view(2, -1).index_copy_(1, self._places, norms)
        self.memory[2 * self._count + self._rank] = self.factor

    def are_finite_by(self, factor: float) -> bool:
        """Whether norms of sums that are multiplied by `factor` are told, and all are finite, as then are the sums themselves.

        `are_there` must be True. On a device the host waits for them.
        """
        first, second, factors = self._told.tensor_split((self._count, 2 * self._count))
        if factor == 1:
            return bool(first.isfinite().all())
        return bool((factors == factor).all() & second.isfinite().all())

    def of(self, tensor: int, is_multiplied: bool = False) -> torch.Tensor:
        """The norm of a tensor's sum, of its dtype and without dimensions, in memory of its own. `are_there` must be True.

        Args:
            is_multiplied: that of the sum that is multiplied by a factor, for which `are_finite_by` has said True.
        """
        norm = self._told[tensor + is_multiplied * self._count]
        return norm.to(self._dtypes[tensor], copy=True)

    @property
    def _told(self) -> torch.Tensor:
        return self.memory if self.staged is None else self.staged.told


class NormsExchange:
    """Computes and sums norms for sums whose ends the host hears of.

    Threads: what `once_there` returns is called on any thread, for one message after another or at once.

    Args:
        norms: to be exchanged.
        begin_sum: begins the sum of a tensor over all ranks, in place, and calls what it is given at its end.
    """

    def __init__(self, norms: Norms, begin_sum: Callable[[torch.Tensor, OnEnd], None]) -> None:
        self.norms, self._begin_sum = norms, begin_sum
        self._lock = threading.Lock()

    def once_there(self, on_done: OnDone) -> OnDone:
        """What to call at the ends of first phases, to tell `on_done` of them; of the last one only when the norms are there.

        Second phases follow it. Norms that came behind their bytes would wait in the network's queues.
        """

        def ended(message: int, error: BaseException | None) -> None:
            if error is None:
                with self._lock:
                    is_last = self.norms.phase_ended()
                if is_last:
                    self._compute(partial(on_done, message))
                    return
            on_done(message, error)

        return ended

    def _compute(self, then: OnEnd) -> None:
        """Every owned sum is in its slot.

        Args:
            then: told of the end of the exchange, or of an error.
        """
        staged = self.norms.staged
        if staged is not None:
            staged.compute(self.norms.factor, partial(self._sum, then))
            return
        if torch.get_num_threads() != self.norms.threads:  # each thread has a number of its own, once it has computed anything
            torch.set_num_threads(self.norms.threads)
        self._sum(then, None)

    def _sum(self, then: OnEnd, error: BaseException | None) -> None:
        """Sum this rank's norms and those of the others."""
        staged = self.norms.staged
        try:
            if error is None:
                self.norms.fill(None if staged is None else staged.computed)
                self._begin_sum(self.norms.memory, partial(self._summed, then))
        except Exception as raised:  # neither torch.distributed nor a thread would tell anybody of it
            error = raised
        if error is not None:
            then(error)

    def _summed(self, then: OnEnd, error: BaseException | None) -> None:
        staged = self.norms.staged
        if staged is None or error is not None:
            self._are_there(then, error)
        else:
            staged.bring_up(self.norms.memory, partial(self._are_there, then))

    def _are_there(self, then: OnEnd, error: BaseException | None) -> None:
        self.norms.are_there = error is None
        then(error)


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
