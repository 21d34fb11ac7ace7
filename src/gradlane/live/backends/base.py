"""Backend: what carries the messages of a session. Two of them: `AllReduce` over torch.distributed, and `Servers`
over gradlane's own transport.

A backend starts sums in the order that it is given and reports each one's end; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.errors import JobError
from gradlane.live.backends.gradient_buffers import MessageBuffer
from gradlane.live.backends.streams import Event

OnDone = Callable[[int, BaseException | None], None]
"""Called once for each message (or half, where sends are not told) with None, or with what went wrong; on any thread."""
OnSent = Callable[[int], None]
"""Called once for each message, before its end, if the backend `tells_sends`; on any thread."""


class Backend(Protocol):
    """What a session asks of whatever carries its messages.

    has_streams: what is reported done may still be queued on a device, see `join`. needs_one_order: every rank must start
    messages in one order, since what meets on the network is told apart by that alone. tells_sends: a message leaves
    its window when this rank's part has been sent; otherwise when its sum is there.
    """

    has_streams: bool
    needs_one_order: bool
    tells_sends: bool

    @property
    def control_group(self) -> Any:
        """A process group for what is exchanged between iterations, in tensors on `control_device`."""

    @property
    def control_device(self) -> torch.device: ...

    def measure(self) -> Network:
        """What messages cost, the same on every rank (collective: all call it alike)."""

    def prepare(self, plan: Plan, buffers: Sequence[MessageBuffer]) -> None:
        """Take up a plan, whose message i is in `buffers[i]` (collective). Nothing may be under way."""

    def begin(self, expected: list[list[int]]) -> None:
        """A new iteration: the agreed order of each lane, where one is needed."""

    def expect(self, message: int) -> None:
        """`message` is the next of the agreed order."""

    def so_far(self) -> Event | None:
        """On a device: the end of what has been queued so far; None on the CPU."""

    def start(self, message: int, buffer: MessageBuffer, ready: list[Event], on_done: OnDone, on_sent: OnSent) -> bool:
        """Begin the sum of `buffer` over all ranks, in place; of a two-phase message, its first half. True if it has ended for
        the host already.

        ready: what `so_far` gave when the bytes were there.
        """

    def start_second_phase(self, message: int, buffer: MessageBuffer, on_done: OnDone) -> bool:
        """Of a two-phase message: `start` began its first half, which has ended or, where sends are told, been sent.

        True if it has ended for the host.
        """

    def join(self, message: int) -> None:
        """On a device: the script's own stream goes on when the sum of `message` is there. It has ended for the host."""

    def has_ended(self, message: int) -> bool:
        """Whether the sum of `message`, which has ended for the host, is there: on a device it may still be queued."""

    def close(self, failure: JobError | None) -> None:
        """Give back what it holds; `failure`: what ended the job before its end."""
