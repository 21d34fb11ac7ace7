"""Backend: what carries the messages of a session. There are two: `AllReduceBackend` over
torch.distributed, and `ParameterServerBackend` over gradlane's own transport. `Carriers` has both,
for a session whose plans choose.

A backend prepares each plan, and gives its `Sums`. They start sums in the order that they are given and report each one's end;
they decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from gradlane.core.backends import BackendName
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.errors import JobError
from gradlane.live.backends.gradient_buffers import MessageBuffer
from gradlane.live.backends.norms import Norms
from gradlane.live.backends.streams import Event
from gradlane.transport import NodeEngine

OnDone = Callable[[int, BaseException | None], None]
"""Called with a message and None, or what went wrong, on any thread, once for each `start` and
`start_second_phase` that did not return True. Of a two-phase message whose sending is told
(`tells_sends`) the end of the first phase is told by `OnSent` instead. An end may be told
late: when the sums are asked to `look`, or once the message is awaited (`await_ends`)."""
OnSent = Callable[[int], None]
"""Called with a message on any thread, once, before its end, if the sums tell sends (`tells_sends`)."""


class Sums(Protocol):
    """The sums of one plan over the ranks of a job, iteration after iteration.

    Threads: `start`, `start_second_phase`, `begin` and `expect` are called under one lock of the session, by any thread, also
    from within `on_done` and `on_sent`. Any thread that uses a parameter may call the others but `carry_out` and `so_far`.
    `on_done` and `on_sent` may be called at any time from any thread, but by one that holds none of the backend's own locks.
    Nothing here waits for another rank.

    For each iteration: `begin` and one `start` for each message. Once every message has ended its first phase, each two-phase
    message gets `start_second_phase`. The next iteration begins when all have ended. If `carry_out` has returned an engine,
    that starts the messages, and of these calls only `begin` is made.

    What has a body here is right for sums in CPU memory whose ends are told by themselves.
    """

    needs_one_order: bool
    """Whether every rank must start the messages of a lane in one order, since what meets on the
    network is told apart by that alone."""
    tells_sends: bool
    """Whether a message leaves its window when this rank's part has been sent, told by `on_sent`;
    otherwise it does when it has ended."""
    norms: Norms | None = None
    """Those of the sums, if the plan's tensors have owners."""

    def carry_out(self, keeps_log: bool, on_failure: Callable[[JobError], None]) -> NodeEngine | None:
        """Carry out the plan without being told to start its messages, if that can be done.

        Args:
            keeps_log: the engine keeps a log of its Dispatcher.
            on_failure: told on any thread if sums of an iteration will not come.

        Returns:
            The engine that is told of gradients and asked for sums; None where each message is to
            be started.
        """
        return None

    def begin(self, expected: list[list[int]]) -> None:
        """A new iteration begins; all of the one before has ended.

        Args:
            expected: by lane, the messages in the agreed order, two-phase ones twice: first the
                first phases of the lane, with whatever has one phase, then its second phases. Empty
                lists where the order comes by `expect`, or where none is needed.
        """

    def expect(self, message: int) -> None:
        """The order goes on with `message`, in its lane. Called before its `start`, or before its
        `start_second_phase`, where `begin` has not told the order. It may be ignored where none is
        needed.
        """
        return

    def so_far(self) -> Event | None:
        """The end of what the script's own stream has been given so far; None on the CPU."""
        return None

    def start(self, message: int, ready: list[Event], on_done: OnDone, on_sent: OnSent) -> bool:
        """Begin the sum of a message over all ranks, in place; of a two-phase message, its first
        phase. Does not wait.

        The buffer's `gather()` comes before the sum, and its `scatter()` before the end is told.

        Args:
            message: an index into the plan's messages, whose buffer holds this rank's part.
            ready: on a device, what `so_far` returned when the bytes were there: the sum begins
                after these events.
            on_done: told of the end, see `OnDone`.
            on_sent: told of the sending, see `OnSent`.

        Returns:
            True if it has ended for the host already, so that `on_done` will not be called; on a
            device it may still be queued, see `join`.

        Raises:
            OrderError: `message` is not the next of the order that is needed; nothing was sent.
            RuntimeError: torch.distributed refuses, since a connection is broken.
        """

    def start_second_phase(self, message: int, on_done: OnDone) -> bool:
        """Begin the second phase of a two-phase message, whose first has ended, or, where sends are
        told, has been sent.

        Args:
            message: an index into the plan's messages.
            on_done: told of the end, see `OnDone`.

        Returns:
            As `start` does.

        Raises what `start` raises.
        """

    def look(self) -> None:
        """Tell, from within this call, of messages that have ended, as far as their ends are not
        told by themselves. Under the session's lock.
        """
        return

    def await_ends(self, messages: Iterable[int]) -> None:
        """Somebody waits for `messages`: from now on tell of their ends when they are there. Under
        the session's lock.
        """
        return

    def join(self, message: int) -> None:
        """On a device: let the script's own stream go on only when the sum of `message`, which has
        ended for the host, is there. The host does not wait.
        """
        return

    def join_norms(self) -> None:
        """On a device: let the script's own stream go on only when the norms, which have come for the host, are there. The host
        does not wait.
        """
        return

    def has_ended(self, message: int) -> bool:
        """Whether the sum of `message`, which has ended for the host, is there; on a device it may
        still be queued.
        """
        return True

    def ended_with(self, messages: Iterable[int]) -> set[int]:
        """On a device: the messages that have ended once `messages` have, those that have ended by now, and
        those for which there is not long to wait behind them.
        """
        return set(messages)


class Measured(NamedTuple):
    """What a backend has measured, the same on every rank.

    Attributes:
        networks: what messages cost over each carrier, in ns and bytes a second. The first carries plans that name none.
        packet_bytes: the size of the servers' packets; None without servers.
    """

    networks: Mapping[BackendName, Network]
    packet_bytes: int | None = None


class Backend(Protocol):
    """Carries the messages of a job between its ranks.

    The training thread makes all calls here but `interrupt`. None of them waits for another rank, except what is marked as
    collective: every rank calls that, in one order.

    `gradlane.testing.backends.check_backend` checks all that is promised here and by `Sums`, on the ranks of a process group.
    """

    has_streams: bool
    """Whether messages are summed on a device, in its streams: what is reported done may still be queued
    there, see `Sums.join`. Otherwise they are in CPU memory."""
    lost: frozenset[int]
    """Messages that were queued on a device and had not ended when `interrupt` or `close` ended them."""

    @property
    def control_group(self) -> Any:
        """A process group of torch.distributed over the same ranks, for what is exchanged between
        iterations, in tensors on `control_device`.
        """

    @property
    def control_device(self) -> torch.device:
        """Where tensors have to be that `control_group` exchanges."""

    def measure(self) -> Measured:
        """Measure what messages cost, and choose what is fastest (collective). No plan may have been prepared.

        Raises:
            JobError: a rank is gone.
        """

    def take_over(self, measured: Measured) -> None:
        """Use what `measure` of another backend has found in place of measuring (collective).

        Args:
            measured: of the same carriers, ranks and options.

        Raises what `measure` raises.
        """

    def prepare(self, plan: Plan, buffers: Sequence[MessageBuffer]) -> Sums:
        """Take up a plan, in place of the one before (collective). Nothing may be under way.

        Args:
            plan: the same on every rank.
            buffers: the memory of each message, in the plan's order. It stays where it is until
                the next `prepare`.

        Returns:
            The sums of the plan. Those of the plan before are not used any more.

        Raises:
            PlanError: the plan asks for what this backend cannot do, see `gradlane.core.backends`.
            UnsupportedError: the platform cannot do it; raised on all ranks alike.
        """

    def interrupt(self) -> None:
        """The job has failed: end what is stuck on a device. Called on any thread, perhaps several times; does not wait."""

    def close(self, failure: JobError | None) -> None:
        """Give back threads, connections and memory. Called once; nothing is called after it.

        Args:
            failure: None where all ranks close and nothing is under way: what is queued leaves
                first. Otherwise what ended the job: nothing is waited for.
        """
