"""Buffers of the model (running statistics and the like), kept as DDP keeps them: rank 0's, at each forward.

DDP broadcasts at the start of a forward pass and waits for it there. Here rank 0's buffers leave at the end
of the forward pass that wrote them, hidden behind backward, and the other ranks take them over at the start
of the next one: same values, no wait. A buffer that a rank's script changed in between keeps its change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradlane.live.groups import Groups

_ALIGN = 16


class BufferSync:
    """Owned by a session; used on the training thread, told of the end of a broadcast on another."""

    def __init__(self, buffers: Sequence[torch.Tensor], group: Any, rank: int, timeout_s: float) -> None:
        self._buffers = list(buffers)
        self._rank = rank
        self._groups = Groups(group, timeout_s)
        self._groups.open()
        offsets, end = [], 0
        for buffer in self._buffers:
            offsets.append(end)
            end += -(-buffer.numel() * buffer.element_size() // _ALIGN) * _ALIGN
        self._bytes = torch.zeros(end, dtype=torch.uint8, device=self._buffers[0].device)
        self._staged = [
            self._bytes[start : start + buffer.numel() * buffer.element_size()].view(buffer.dtype).view(buffer.shape)
            for start, buffer in zip(offsets, self._buffers, strict=True)
        ]
        self._versions: list[int] = []
        self._work: Any = None
        self._ended = True
        self._notify: Callable[[BaseException | None], None] = lambda error: None

    def on_end(self, notify: Callable[[BaseException | None], None]) -> None:
        """Whom to tell that a broadcast ended, on whatever thread."""
        self._notify = notify

    def send(self) -> None:
        """The forward pass has ended: rank 0's buffers are on their way."""
        if self._rank == 0:
            torch._foreach_copy_(self._staged, self._buffers)
        self._versions = [buffer._version for buffer in self._buffers]
        self._ended = False
        self._work = dist.broadcast(self._bytes, group_src=0, group=self._groups[0], async_op=True)
        if self._bytes.device.type == "cpu":
            self._groups.when_ended([self._work], self._end)

    def _end(self, error: BaseException | None) -> None:
        self._ended = error is None
        self._notify(error)

    def apply(self, wait_until: Callable[[Callable[[], bool], str], None]) -> None:
        """A forward pass begins: take over what rank 0 sent, if anything."""
        if not self.finish(wait_until) or self._rank == 0:
            return
        fresh = [index for index, buffer in enumerate(self._buffers) if buffer._version == self._versions[index]]
        with torch.no_grad():
            torch._foreach_copy_([self._buffers[i] for i in fresh], [self._staged[i] for i in fresh])

    def finish(self, wait_until: Callable[[Callable[[], bool], str], None]) -> bool:
        """Wait for the broadcast under way; False if there is none."""
        if self._work is None:
            return False
        if self._bytes.device.type == "cpu":
            wait_until(lambda: self._ended, "the broadcast of the model's buffers")
        else:
            self._work.wait()  # the stream waits, the host does not
        self._work = None
        return True

    def close(self) -> None:
        """Give the process group back."""
        self._groups.close()
