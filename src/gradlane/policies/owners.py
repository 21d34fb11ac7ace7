"""owners: gradlane's own policy for scripts that clip gradients by their norm."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import ClassVar

import msgspec

from gradlane.core.fields import MAX_BYTES, need_int
from gradlane.core.network import Network
from gradlane.core.plan import Message, Ownership, Plan
from gradlane.core.policy import KnobRange, balanced_bytes, whole
from gradlane.core.profile import Profile

_TRIED = tuple(size * 2**20 for size in (16, 4, 8, 32, 64))


class Owners(msgspec.Struct, frozen=True):
    """Each tensor has an owner, which has its sum, and tells its norm, after half of the bytes.

    `clip_grad_norm_` needs every sum before the first update, but not every sum on every rank. The first phase of
    a message brings each owner the sums of its tensors, behind the backward pass. Owners compute the norms, whose
    exchange is one small sum. The second phase brings the sums to all ranks, in order of first use, behind
    the next forward pass.

    Neighbouring tensors share a message until it has at least b = sqrt(a S r / 2) bytes, as in `blocks`. No owner has much more
    than an equal share of it. Of a message the largest tensor goes first, to the owner that has the least. A tensor is never
    cut, since its norm is that of the whole. One that is larger than an equal share of the largest message is summed on all
    ranks in one phase.

    Wins where a script clips gradients by their norm in each step, or has a GradScaler, and sums do not hide behind the
    backward pass. The fewer ranks there are, and the more alike tensors are, the more bytes pass behind the forward pass.

    Differs from the paper: there is none.

    Attributes:
        order: of the norms, as in `core.plan.Ownership`: 2 for `clip_grad_norm_` as it is, 0 for infinity.
        least_bytes: the smallest message of two phases, but for the last.
        most_bytes: from this size on a message is complete, however evenly owners share it. 0: of 4 to 64 MiB the one
            that is fastest in the simulator.
    """

    name: ClassVar[str] = "owners"
    paper: ClassVar[str] = "none: gradlane's own"
    differs: ClassVar[str] = "-"

    tunable: ClassVar[dict[str, KnobRange]] = {"most_bytes": KnobRange(4 * 2**20, 64 * 2**20)}

    order: int = 2
    least_bytes: int = 512 * 1024
    most_bytes: int = 0

    def __post_init__(self) -> None:
        need_int("order", self.order, 0, 64)
        need_int("least_bytes", self.least_bytes, 8, MAX_BYTES)
        need_int("most_bytes", self.most_bytes, 0, MAX_BYTES)

    def trials(self) -> tuple[Owners, ...]:
        """Where the size is to be found, the policies to choose from."""
        return () if self.most_bytes else tuple(msgspec.structs.replace(self, most_bytes=size) for size in _TRIED)

    def plan(self, profile: Profile, network: Network) -> Plan:
        urgency = profile.urgency()
        deal = _Deal([seen.spec.size_bytes for seen in profile.tensors], network.workers)
        messages: list[Message] = []
        for tensors, two_phase in self._groups(profile, network, deal):
            slices = tuple(whole(profile, tensor) for tensor in deal.to_owners(tensors))
            messages.append(Message(slices, min(urgency[tensor] for tensor in tensors), two_phase=two_phase))
        owners = Ownership(tuple(deal.owner_of), self.order)
        plan = Plan(self.name, profile.model, profile.specs, tuple(messages), crosses_barrier=True, owners=owners)
        sequence = self._sequence(plan, profile, network)
        return plan.with_sequence(sequence) if len(sequence) > len(messages) else plan

    def _groups(self, profile: Profile, network: Network, deal: _Deal) -> Iterator[tuple[list[int], bool]]:
        """The tensors of each message, and whether it has two phases, in order of readiness."""
        most_bytes = self.most_bytes or _TRIED[0]
        least_bytes = min(max(balanced_bytes(profile.size_bytes, network, 2), self.least_bytes), most_bytes)
        group: list[int] = []
        group_bytes = 0
        for tensor, seen in enumerate(profile.tensors):
            spec = seen.spec
            if group and profile.tensors[group[-1]].spec.dtype != spec.dtype:
                yield group, True
                group, group_bytes = [], 0
            if spec.size_bytes * network.workers > deal.EVEN * most_bytes:
                yield [tensor], False
                continue
            group.append(tensor)
            group_bytes += spec.size_bytes
            if group_bytes >= most_bytes or (group_bytes >= least_bytes and deal.is_even(group)):
                yield group, True
                group, group_bytes = [], 0
        if group:
            yield group, True

    def _sequence(self, plan: Plan, profile: Profile, network: Network) -> tuple[int, ...]:
        """First phases in order of readiness. Where the network would wait for gradients, the most urgent second phase comes in
        between, if that first phase has ended and no norm is known later for it.
        """
        ready_ns = [max(profile.tensors[tensor].ready_ns for tensor in message.tensors) for message in plan.messages]
        phase_ns = [self._phase_ns(plan, index, network) for index in range(len(plan.messages))]
        end_ns = 0
        for ready, took in zip(ready_ns, phase_ns, strict=True):
            end_ns = max(end_ns, ready) + took
        waiting: list[int] = []  # messages whose second phases have no place
        sequence: list[int] = []
        now_ns, latest_ns = 0, end_ns - sum(phase_ns)  # latest_ns: when this first phase and all later ones must begin
        for index, message in enumerate(plan.messages):
            while waiting and now_ns < ready_ns[index]:
                urgent = min(waiting, key=lambda each: plan.messages[each].priority)
                if now_ns + phase_ns[urgent] > latest_ns:
                    break
                waiting.remove(urgent)
                sequence.append(urgent)
                now_ns += phase_ns[urgent]
            sequence.append(index)
            now_ns = max(now_ns, ready_ns[index]) + phase_ns[index]
            latest_ns += phase_ns[index]
            if message.two_phase:
                waiting.append(index)
        return tuple(sequence)

    def _phase_ns(self, plan: Plan, index: int, network: Network) -> int:
        """What each phase of a message takes. One of two takes half of the message's time, and half of the least time of any
        message, which other messages hide now and then.
        """
        cost_ns = network.cost_ns(plan.sum_bytes(index, network.workers))
        return cost_ns // 2 + network.min_message_ns // 2 if plan.messages[index].two_phase else cost_ns


class _Deal:
    """Deals tensors to owners."""

    EVEN = 1.25  # the largest part of a message, as a multiple of an equal share

    def __init__(self, sizes: list[int], ranks: int) -> None:
        self._sizes, self._ranks = sizes, range(ranks)
        self._owned_bytes = [0] * ranks
        self.owner_of = [0] * len(sizes)

    def is_even(self, tensors: list[int]) -> bool:
        """Whether no owner would have much more than an equal share of a message of `tensors`."""
        most_bytes = self.EVEN * sum(self._sizes[tensor] for tensor in tensors) / len(self._ranks)
        if max(self._sizes[tensor] for tensor in tensors) > most_bytes:
            return False  # whoever owns it
        return max(self._parts(tensors)[0]) <= most_bytes

    def to_owners(self, tensors: list[int]) -> list[int]:
        """Deal the tensors of a message, and return them in the order of their owners."""
        parts, owner_of = self._parts(tensors)
        for tensor, owner in owner_of.items():
            self.owner_of[tensor] = owner
        for owner, part in enumerate(parts):
            self._owned_bytes[owner] += part
        return sorted(tensors, key=lambda tensor: (owner_of[tensor], tensor))

    def _parts(self, tensors: list[int]) -> tuple[list[int], dict[int, int]]:
        """By owner its part of a message, and by tensor its owner: of the largest first, whoever has the least yet."""
        parts, owner_of = [0 for _ in self._ranks], {}
        least = [(0, owned_bytes, rank) for rank, owned_bytes in enumerate(self._owned_bytes)]
        heapq.heapify(least)
        for tensor in sorted(tensors, key=lambda tensor: (-self._sizes[tensor], tensor)):
            part, owned_bytes, rank = least[0]
            owner_of[tensor], parts[rank] = rank, part + self._sizes[tensor]
            heapq.heapreplace(least, (parts[rank], owned_bytes, rank))
        return parts, owner_of
