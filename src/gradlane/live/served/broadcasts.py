"""Broadcasts: buffers of the model kept equal to rank 0's, where ranks are in step; waits for them that end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradlane.errors import CommunicationError
from gradlane.live.buffers import BufferSync
from gradlane.live.served.values import Values

_VERDICT_S = 1.5  # how long a failed broadcast waits for the transport to name the culprit


class Broadcasts:
    """Owned by a session; used on the training thread, told of the end of a broadcast on another."""

    def __init__(self, buffers: Sequence[torch.Tensor], values: Values, group: Any, rank: int, timeout_s: float) -> None:
        self._sync = BufferSync(buffers, group, rank, timeout_s)
        self._values, self._rank, self._timeout_s = values, rank, timeout_s
        self._condition = threading.Condition()
        self._error: BaseException | None = None
        self._sync.on_end(self._ended)

    def send(self) -> None:
        """The forward pass has ended: rank 0's buffers are on their way."""
        self._sync.send()

    def apply(self) -> None:
        """A forward pass begins: take over what rank 0 sent, if anything."""
        self._sync.apply(self._wait_until)

    def close(self) -> None:
        """Wait for what is under way, and give the process group back."""
        self._sync.finish(self._wait_until)
        self._sync.close()

    def _ended(self, error: BaseException | None) -> None:
        """On a thread of torch.distributed."""
        with self._condition:
            self._error = self._error or error
            self._condition.notify_all()

    def _wait_until(self, predicate: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        with self._condition:
            while not predicate() and self._error is None and (left_s := deadline - time.monotonic()) > 0:
                self._condition.wait(left_s)
            if predicate():
                return
        if self._error is not None:  # a rank is gone, which the transport will shortly know by name
            self._values.await_failure(_VERDICT_S)
        self._values.check()
        reason = str(self._error or f"no end within {self._timeout_s:.0f} s").partition("\n")[0]
        raise CommunicationError(f"rank {self._rank}: {what} failed: {reason}")
