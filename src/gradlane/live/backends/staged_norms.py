"""StagedNorms: norms of sums that are in CPU memory, computed by the device that the gradients are on.

A device's kernels add in another order than those of the CPU. So an owner's sums go up to their slots as soon as they are
whole, the device computes the norms there, and only those come down again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradlane.live.backends.norm_kernels import OwnedNorms
from gradlane.live.backends.process_groups import OnEnd
from gradlane.live.backends.staging import Staging
from gradlane.live.backends.streams import Streams


class StagedNorms:
    """The norms of one plan. What it is given to call is called on the thread of `Staging`.

    Args:
        staging: of the session.
        streams: of the device.
        owned: by message, the tensors whose sums this rank has.
        order: of the norms.
        memory: what all ranks tell, in CPU memory, see `Norms`.

    Attributes:
        computed: both norms of the owned sums, in CPU memory, as in `OwnedNorms.table`.
        told: as `memory`, on the device.
    """

    def __init__(
        self, staging: Staging, streams: Streams, owned: Sequence[Sequence[int]], order: float, memory: torch.Tensor
    ) -> None:
        self._staging, self._owned = staging, owned
        self._norms = OwnedNorms(owned, staging.slots, order)
        self.computed = streams.host_memory(self._norms.table.to("meta"))
        self._leaving = streams.host_memory(memory.to("meta"))
        self.told = torch.zeros_like(memory, device=staging.device)

    def compute(self, messages: Sequence[int], factor: float, then: OnEnd) -> None:
        """Compute both norms of the owned sums of `messages`, which the mirror has; then call `then`. Any thread."""
        owned = [tensor for message in messages for tensor in self._owned[message]]
        self._staging.run_above(owned, lambda: self._norms.compute(messages, factor), then)

    def bring_down(self, then: OnEnd) -> None:
        """Copy what was computed to `computed`; then call `then`. Any thread."""
        self._staging.run_above((), lambda: self.computed.copy_(self._norms.table, non_blocking=True), then)

    def bring_up(self, norms: torch.Tensor, then: OnEnd) -> None:
        """Copy what all ranks tell to the device; then call `then`. Any thread."""
        self._leaving.copy_(norms)
        self._staging.run_above((), lambda: self.told.copy_(self._leaving, non_blocking=True), then)
