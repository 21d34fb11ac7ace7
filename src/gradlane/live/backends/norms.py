"""Norms: what owners tell of their sums, while the sums are on their way to the other ranks.

`Norms` has the numbers of one iteration. A script with a GradScaler multiplies its gradients by a factor and then takes norms.
Owners cannot know the factor while the sums are on their way, but it is seldom another than in the iteration before. So they
multiply their sums by the last factor, and tell a second norm and that factor. A rank uses a second norm only if all owners
have told the factor of its own script.

`NormsExchange` computes norms when the host hears that first phases have ended, and sums them behind the last one. Sums in a
device's stream do so in that stream. Norms are computed in batches, while other messages are on their way: those of 164 MiB
take 15 ms on one core, and 50 with a factor (bench/notes/auto.md).
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
from gradlane.live.backends.norm_kernels import OwnedNorms
from gradlane.live.backends.process_groups import OnEnd
from gradlane.live.backends.staged_norms import StagedNorms

if TYPE_CHECKING:
    from gradlane.live.backends.base import OnDone

_BATCH_BYTES = 4 << 20
"""Of owned sums: one core takes 0.4 ms for their norms, beside which the host's calls do not matter."""


class Norms:
    """The norms of one iteration's sums, on all ranks, once every first phase has ended.

    Each owner computes those of its tensors, with torch's own kernel and from the whole tensor, so that they have the
    bits of norms that the script would compute. A sum of the ranks' norms brings them to all: only the owner adds another
    number than zero.

    Threads: any thread calls `phase_ended` and `tell`, one at a time, and `compute`, for other messages at once. The training
    thread calls the rest.

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
        owned: by message, this rank's tensors.
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
        self.owned = [[tensor for tensor in message.tensors if owners.ranks[tensor] == rank] for message in plan.messages]
        self.staged: StagedNorms | None = None
        slots = [slot_of[tensor] for tensor in range(len(plan.tensors))]
        self._dtypes = [slot.dtype for slot in slots]
        self._owned_bytes = [sum(slots[tensor].nbytes for tensor in tensors) for tensors in self.owned]
        self._own = OwnedNorms(self.owned, slots, self.order)
        self._rank, self._count = rank, len(slots)
        self.memory = torch.empty(2 * self._count + world, dtype=torch.float64, device=slots[0].device)
        self.factor = self.next_factor = 1.0
        self.begin()

    def begin(self) -> None:
        """An iteration begins."""
        self.threads = torch.get_num_threads()
        self.factor, self.next_factor = self.next_factor, 1.0
        self.are_there = False
        self._missing = len(self.owned)
        self._batch: list[int] = []
        self._batch_bytes = 0

    def phase_ended(self, message: int) -> tuple[list[int], bool]:
        """The first phase of `message` has ended, or is queued in the stream of `compute`.

        Returns:
            The messages to `compute` norms of, if a batch of them is together, and whether this was the last first phase.
        """
        self._missing -= 1
        self._batch.append(message)
        self._batch_bytes += self._owned_bytes[message]
        batch: list[int] = []
        if self._batch_bytes >= _BATCH_BYTES or not self._missing:
            batch, self._batch, self._batch_bytes = self._batch, batch, 0
        return batch, not self._missing

    def compute(self, messages: Sequence[int]) -> None:
        """Compute the norms of owned sums of `messages`, where the sums are."""
        self._own.compute(messages, self.factor)

    def tell(self) -> None:
        """Put this rank's norms in the memory, and zeros for the others. All are computed."""
        self.memory.zero_()
        own = self._own.table if self.staged is None else self.staged.computed
        self.memory[: 2 * self._count] = own.view(-1)
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
        self._computing = 0  # batches
        self._error: BaseException | None = None  # of a batch
        self._then: OnEnd | None = None  # to be told of the norms, once the last first phase has ended

    def once_there(self, on_done: OnDone) -> OnDone:
        """What to call at the ends of first phases, to tell `on_done` of them; of the last one only when the norms are there.

        Second phases follow it. Norms that came behind their bytes would wait in the network's queues.
        """

        def ended(message: int, error: BaseException | None) -> None:
            if error is not None:
                on_done(message, error)
                return
            with self._lock:
                batch, is_last = self.norms.phase_ended(message)
                self._computing += bool(batch)
                if is_last:
                    self._then = partial(on_done, message)
            if not is_last:
                on_done(message, None)
            if batch:
                self._compute(batch)

        return ended

    def _compute(self, batch: Sequence[int]) -> None:
        staged = self.norms.staged
        if staged is not None:
            staged.compute(batch, self.norms.factor, self._computed)
            return
        if torch.get_num_threads() != self.norms.threads:  # each thread has a number of its own, once it has computed anything
            torch.set_num_threads(self.norms.threads)
        self._computed(_error_of(lambda: self.norms.compute(batch)))

    def _computed(self, error: BaseException | None) -> None:
        """A batch is computed, or there is an error: the norms are told when it was the last, after the last first phase."""
        with self._lock:
            self._computing -= 1
            self._error = self._error or error
            if self._computing or self._then is None:
                return
            then, self._then = self._then, None
            error, self._error = self._error, None
        staged = self.norms.staged
        if staged is None or error is not None:
            self._sum(then, error)
        else:
            staged.bring_down(partial(self._sum, then))

    def _sum(self, then: OnEnd, error: BaseException | None) -> None:
        """Sum this rank's norms and those of the others."""

        def begin() -> None:
            self.norms.tell()
            self._begin_sum(self.norms.memory, partial(self._summed, then))

        error = error or _error_of(begin)
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


def _error_of(call: Callable[[], object]) -> Exception | None:
    """What `call` raises. Neither torch.distributed nor a thread would tell anybody of it."""
    try:
        call()
    except Exception as error:
        return error
    return None


def owners_of(plan: Plan) -> Ownership:
    """The owners of the plan's tensors, which it must have."""
    assert plan.owners is not UNSET
    return plan.owners


def scatter_of_others(plan: Plan, index: int, buffer: MessageBuffer, rank: int, world: int) -> Callable[[], None]:
    """What does `buffer.scatter` for sums of the other ranks, which a second phase brings.

    This rank's own are in their slots since the first phase, where norms of them may be computed at that time.
    """
    lengths = part_lengths(plan, index, buffer, world)
    first = sum(lengths[:rank])
    return buffer.scattering((0, first), (first + lengths[rank], sum(lengths)))


def part_lengths(plan: Plan, index: int, buffer: MessageBuffer, world: int) -> list[int]:
    """By rank how much of a two-phase message it owns, in elements of `buffer`, with presence and padding."""
    lengths = [0] * world
    for tensor, length in zip(plan.messages[index].tensors, buffer.lengths, strict=True):
        lengths[owners_of(plan).ranks[tensor]] += length
    return lengths
