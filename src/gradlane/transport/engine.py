"""NodeEngine: a plan that a node carries out by itself, in native code.

It is `gradlane.schedule.Engine` over this transport. From `ready` on nothing enters the interpreter:
what is sent and what ends starts the next message on the node's own thread, until somebody waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, cast

from gradlane.core.plan import Plan, returns_whole
from gradlane.core.records.dispatch_log import Fact, Log, What
from gradlane.core.timeline import Kind
from gradlane.errors import CommunicationError
from gradlane.schedule.dispatcher import describe_state
from gradlane.schedule.native import native_schedule
from gradlane.transport.node import DTYPES, Node

_EVERYTHING, _AS_IT_IS = -1, -1  # in native code


class CopiedRange(NamedTuple):
    """Memory for which a message stands.

    Attributes:
        address: of its first byte.
        size_bytes: of the range itself.
        half: "float16" or "bfloat16" for float32 that travels so; None where it is copied as it is.
    """

    address: int
    size_bytes: int
    half: str | None = None


class MessageMemory(NamedTuple):
    """Where the bytes of one message are.

    Attributes:
        address: of the memory that the node sends and receives.
        ranges: those that it stands for, copied to it before the message starts and back when its
            sum is there; empty where it is the memory itself.
    """

    address: int
    ranges: Sequence[CopiedRange]


class NodeEngine:
    """The messages of one plan on their way, iteration after iteration.

    All memory must stay until the node carries out another plan or is closed. One thread calls `begin`, and one, which may
    be another, `ready` after it; any may wait, or call the rest.

    Args:
        node: its tensors from `first` on are the messages of the plan, in order, or the pieces of these.
        plan: what is carried out, from now on; nothing of the plan before is under way.
        memory: of each message.
        first: the node's tensor that is message 0, or its first piece.
        pieces: of how many tensors each message is; None: of one each.
        keeps_log: keep the last iterations' facts and answers, see `log`.

    Attributes:
        ready: the gradients of some tensors are in their memory; returns the time of this, in ns.
    """

    ready: Callable[[Sequence[int]], int]

    def __init__(
        self,
        node: Node,
        plan: Plan,
        memory: Sequence[MessageMemory],
        first: int,
        *,
        pieces: Sequence[int] | None = None,
        keeps_log: bool = False,
    ) -> None:
        self.plan = plan
        self._owner, self._node = node, node.native
        self.ready = self._node.ready  # bound once: called for every few gradients
        self._keeps_log = keeps_log
        self._engine = self._node.carry_out(
            native_schedule(plan),
            plan.tensors_by_message,
            [(each.address, [_as_native(part) for part in each.ranges]) for each in memory],
            list(accumulate(pieces or [1] * len(plan.messages), initial=first)),
            forwards=not returns_whole(plan.wire),
            keeps_log=keeps_log,
        )

    # -- facts -----------------------------------------------------------------------------------------

    def begin(self, iteration: int) -> None:
        """Iteration `iteration` begins; every message of the one before has arrived."""
        self._node.begin(iteration)

    def lacks(self, tensor: int) -> None:
        """`tensor`, which servers update, has no gradient in this iteration: its messages go without."""
        self._node.lacks(tensor)

    def flush(self) -> None:
        """No more gradients follow for now: what is ready is sent at once, and not with what follows."""
        self._node.flush()

    # -- questions --------------------------------------------------------------------------------------

    def has_arrived(self, tensor: int) -> bool:
        """Whether every message of `tensor` has arrived."""
        return not self._engine.late((tensor,))

    def late(self, tensors: Sequence[int]) -> list[int]:
        """Those of `tensors` that have not arrived."""
        return self._engine.late(tensors)

    @property
    def all_arrived(self) -> bool:
        """Whether every message of this iteration has arrived."""
        return self._engine.all_arrived()

    @property
    def communicated_ns(self) -> int:
        """For how long so far at least one message was on its way; one that still is does not count yet."""
        return self._engine.communicated_ns()

    def describe_state(self) -> str:
        """Describe the messages in flight and awaited, for errors."""
        return describe_state(self.plan, *self._node.plan_state())

    @property
    def log(self) -> Log | None:
        """The facts of the last iterations and what the Dispatcher answered; None where no log is kept."""
        if not self._keeps_log:
            return None
        return Log(
            self.plan, tuple(Fact(cast(What, what), subject, tuple(starts)) for what, subject, starts in self._node.facts())
        )

    def spans(self, *, last: bool) -> list[tuple[Kind, int, int, int, int]]:
        """What happened when, over the last 64 iterations or the last one: kind, iteration, tensor or
        message, start and end in ns.
        """
        return cast(list[tuple[Kind, int, int, int, int]], self._node.spans(last))

    def abandon(self, why: str) -> None:
        """End the job with `why`: no memory of the plan is written to after this returns."""
        self._node.abort(why)

    # -- waiting ----------------------------------------------------------------------------------------

    @property
    def interruptions(self) -> int:
        """How often waits were to end for another reason than that something arrived."""
        return self._engine.interruptions()

    def interrupt(self) -> None:
        """End the wait that is under way; a failure of the node does so too."""
        self._engine.interrupt()

    def wait(self, tensor: int | None, interruptions: int, timeout_s: float) -> bool:
        """Wait until `tensor` has arrived, or with None everything, without the interpreter's lock.

        Args:
            tensor: what is waited for.
            interruptions: the wait ends at once if there have been more by now.
            timeout_s: seconds to wait at most.

        Returns:
            Whether it has arrived.
        """
        awaited = _EVERYTHING if tensor is None else tensor
        return self._engine.wait(self._node, awaited, interruptions, max(0, round(timeout_s * 1000)))

    def wait_or_fail(
        self,
        tensor: int | None,
        timeout_s: float,
        late: Callable[[], str],
        look: Callable[[], None] = lambda: None,
        every_s: float = math.inf,
    ) -> None:
        """Wait until `tensor` has arrived, or with None everything.

        Args:
            tensor, timeout_s: as for `wait`.
            late: says what has not come, for the error.
            look: called again and again meanwhile; what it raises ends the wait.
            every_s: seconds from one call to the next.

        Raises:
            CommunicationError: after `timeout_s`; this ends the job, as `abandon` does.
            JobError: the node's failure.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            seen = self.interruptions  # before the look at failures: one that comes after it ends the wait
            self._owner.check()
            left_s = deadline - time.monotonic()
            if self.wait(tensor, seen, min(left_s, every_s)):
                return
            self._owner.check()
            look()
            if left_s <= every_s:
                text = f"{late()} within {timeout_s:.0f} s; is another rank slow, or gone?"
                self.abandon(text)
                raise CommunicationError(text)


def _as_native(part: CopiedRange) -> tuple[int, int, int]:
    return part.address, part.size_bytes, _AS_IT_IS if part.half is None else DTYPES[part.half]
