"""Backend: carries the messages of a session. `AllReduceBackend` uses torch.distributed,
`ParameterServerBackend` gradlane's own transport.

A backend starts sums in the order in which the session hands them over and reports the end of each.
It decides nothing.
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
"""A backend calls it when a message's sum is there, with its index and None, or with the error; on
any thread, once. Without `tells_sends` a backend also calls it at the end of a two-phase message's
first phase.
"""
OnSent = Callable[[int], None]
"""A backend that `tells_sends` calls it, before `OnDone`, when this rank's part has been sent; on
any thread, once.
"""


class Backend(Protocol):
    """What a session needs from whatever carries its messages.

    "Collective" methods are called by every rank, in the same order.

    Attributes:
        has_streams: a sum is reported done when it is queued on a device's stream; `join` orders
            later work after it.
        needs_one_order: every rank must start messages in the same order, as collectives are
            matched by order alone.
        tells_sends: a message leaves its lane's window when this rank's part has been sent;
            otherwise when its sum is there.
    """

    has_streams: bool
    needs_one_order: bool
    tells_sends: bool

    @property
    def control_group(self) -> Any:
        """The process group for collectives between iterations; their tensors are on
        `control_device`.
        """

    @property
    def control_device(self) -> torch.device: ...

    def measure(self) -> Network:
        """Measure what messages cost (collective). Every rank gets the same network."""

    def prepare(self, plan: Plan, buffers: Sequence[MessageBuffer]) -> None:
        """Take up a plan (collective). No message may be in flight.

        Args:
            plan: the plan.
            buffers: the memory of message i is `buffers[i]`.

        Raises:
            UnsupportedError, PlanError: the backend cannot carry `plan`.
        """

    def begin(self, expected: list[list[int]]) -> None:
        """An iteration begins. `expected` has the order of messages for each lane; ignored unless
        `needs_one_order`.
        """

    def expect(self, message: int) -> None:
        """Append `message` to its lane's order, for a coordinator that decides as it goes."""

    def so_far(self) -> Event | None:
        """An event at the end of the work queued on the script's stream so far; None on the CPU."""

    def start(self, message: int, buffer: MessageBuffer, ready: list[Event], on_done: OnDone, on_sent: OnSent) -> bool:
        """Begin the sum of a message over all ranks, in place; of a two-phase message, its first
        phase.

        Args:
            message: index in the plan.
            buffer: its memory.
            ready: events from `so_far`, after which the gradients are in place.
            on_done, on_sent: see `OnDone` and `OnSent`.

        Returns:
            True if the sum is queued on a device: the host need not wait, and `on_done` is not
            called.
        """

    def start_second_phase(self, message: int, buffer: MessageBuffer, on_done: OnDone) -> bool:
        """Begin the second phase of a two-phase message.

        The first phase must have ended or, if the backend `tells_sends`, been sent. Returns as
        `start` does.
        """

    def join(self, message: int) -> None:
        """Make the script's stream wait for the sum of `message`, which was reported done; nothing
        to do on the CPU.
        """

    def has_ended(self, message: int) -> bool:
        """Whether the sum of `message`, which was reported done, is there; on a device it may still
        be queued.
        """

    def close(self, failure: JobError | None) -> None:
        """Release threads, groups and connections. `failure` is what ended the job early, None if
        nothing did.
        """
