"""Broadcasts: buffers of the model kept equal to rank 0's, where ranks are in step; waits for them that end.

As in DDP they are sent at the start of a forward pass: there is no control channel over which rank 0 could say that its
script has changed one since.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from gradlane.errors import CommunicationError
from gradlane.live.remote_update.values import Values
from gradlane.live.session.module_buffers import BufferSync, places_of_buffers

_VERDICT_S = 1.5  # how long a failed broadcast waits for the transport to name the culprit


class Broadcasts:
    """Owned by a session; used on the training thread, told of the end of a broadcast on another."""

    def __init__(self, model: torch.nn.Module, values: Values, group: Any, rank: int, timeout_s: float) -> None:
        places = places_of_buffers(model)
        self._sync = BufferSync(*places, group, rank, timeout_s, always_at_start=True, has_channel=False)
        self._values, self._rank, self._timeout_s = values, rank, timeout_s
        self._condition = threading.Condition()
        self._error: BaseException | None = None
        self._sync.connect(lambda forward, why: None, self._ended)

    def before_forward(self) -> None:
        """Take over what rank 0 has, where DDP would."""
        self._sync.before_forward(self._wait_until, trains=True, settled=False)

    def after_forward(self) -> None:
        """A forward pass has ended after which DDP would broadcast rank 0's buffers."""
        self._sync.after_forward()

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
