"""Patience: how long `step()` waits for sums before it defers the updates that need them.

To defer an update costs time of the processor: aliases are looked for, the parameter and its
gradient are guarded, and the update runs later. If the missing sums arrive sooner than that takes,
it is faster to wait for them, whatever follows the step.
"""

from __future__ import annotations

# for each tensor: 467 tensors of 4 KB under `blocks`, of which 150 were deferred, took 2.3 ms of a rank's processor more
_DEFERRING_NS = 10_000
# for each message whose end is told by a thread of torch.distributed, see `process_groups.UnderWay`
_TELLING_NS = 100_000
_LONGEST_PAUSE = 63  # steps


class Patience:
    """Decides by the number of late tensors, and waits less often where waiting has not helped."""

    def __init__(self) -> None:
        self._next_pause = self._pause = 0

    def limit_ns(self, tensors: int, told: int) -> int:
        """How long to wait before the updates of this step are deferred; 0 for not at all.

        Args:
            tensors: those whose sums have not arrived.
            told: how many messages' ends would be told one by one if they were waited for.
        """
        if self._pause:
            self._pause -= 1
            return 0
        return max(0, tensors * _DEFERRING_NS - told * _TELLING_NS)

    def waited(self, *, in_vain: bool) -> None:
        """Note how the wait that was allowed has ended: after each one in vain the next is put off for longer."""
        self._next_pause = min(2 * self._next_pause + 1, _LONGEST_PAUSE) if in_vain else 0
        self._pause = self._next_pause
