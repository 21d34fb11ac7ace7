"""Core: carries out a plan for a framework, by the four calls of ByteScheduler's CommTask (SOSP '19
§3.2).

    the core to the framework        `Engine.partition`   these messages exist, and what is in each
                                     `Engine.start`       begin this one now
    the framework to the core        `Core.notify_ready`  the gradient of this tensor is in its
    memory
                                     `Core.notify_finish` this message's sum has arrived

A CommTask is one tensor with its partitions. A message here may also merge several tensors, so
readiness is of tensors and starts and ends are of messages.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol

from gradlane.core.plan import Plan
from gradlane.errors import CommunicationError, GradlaneError
from gradlane.schedule import Dispatcher


class Engine(Protocol):
    """What a framework provides: sums of messages."""

    def partition(self, plan: Plan, core: Core) -> None:
        """Prepare the messages of `plan`; called once, before all else.

        Raises:
            PlanError: the engine cannot carry the plan.
        """
        ...

    def start(self, message: int) -> None:
        """Begin the sum of `message` over all ranks; never blocks.

        The engine calls `core.notify_finish` once at its end, on any thread, also from within this
        call. Starts come one after another, by the plan's priorities and windows. A two-phase
        message starts twice; its second phase starts when its first has ended (or, after
        `core.notify_sent`, has been sent).
        """
        ...


class Core:
    """Schedules the messages of one plan, iteration after iteration. Any thread may call any
    method.

    Args:
        plan: the plan. If ranks must start messages in one order (collectives), it needs a
            sequence; gradlane's transport identifies messages and needs none.
        engine: what moves bytes.
    """

    def __init__(self, plan: Plan, engine: Engine) -> None:
        self.plan = plan
        self._engine = engine
        self._dispatcher = Dispatcher(plan)
        self._condition = threading.Condition(threading.RLock())
        self._parts_at_first = [0] * len(plan.tensors)
        for message in plan.messages:
            for tensor in message.tensors:
                self._parts_at_first[tensor] += 1
        self._parts = [0] * len(plan.tensors)  # for each tensor, how many of its messages' sums are missing
        self._sent: set[int] = set()
        self._to_start: deque[int] = deque()
        self._starting = False
        self._failure: GradlaneError | None = None
        self.iteration = -1
        engine.partition(plan, self)

    def begin(self) -> None:
        """Begin an iteration; the caller has waited for every sum of the one before."""
        with self._condition:
            self._check()
            assert not any(self._parts), f"iteration {self.iteration} is under way: {self._dispatcher.describe_state()}"
            self.iteration += 1
            self._parts = list(self._parts_at_first)
            self._sent.clear()
            self._dispatcher.begin()

    def notify_ready(self, tensor: int) -> None:
        """The gradient of `tensor` is in its memory, which the engine owns until the sum has
        arrived.
        """
        with self._condition:
            self._check()
            self._start(self._dispatcher.ready(tensor))

    def notify_sent(self, message: int) -> None:
        """This rank's part of `message` has been sent: it leaves its lane's window now, not with
        its sum.

        For engines whose ranks start messages in different orders, which would otherwise wait for
        one another.
        """
        with self._condition:
            self._sent.add(message)
            self._start(self._dispatcher.finished(message))

    def notify_finish(self, message: int) -> None:
        """The sum of `message` is in its tensors' memory; or its first phase has ended."""
        two_phase = self.plan.messages[message].two_phase
        with self._condition:
            if two_phase and not self._dispatcher.in_second_phase(message):
                self._start(self._dispatcher.finished(message))
                return
            for tensor in self.plan.messages[message].tensors:
                self._parts[tensor] -= 1
            if two_phase or message not in self._sent:
                self._start(self._dispatcher.finished(message))
            self._condition.notify_all()

    def notify_failure(self, error: GradlaneError) -> None:
        """No more sums will come: all waits, and every later call, raise the first `error`."""
        with self._condition:
            self._failure = self._failure or error
            self._condition.notify_all()

    def has_arrived(self, tensor: int) -> bool:
        """Whether the sum of `tensor` has arrived, without waiting."""
        return self._parts[tensor] == 0

    def wait(self, tensor: int, timeout_s: float = 60.0) -> None:
        """Return when the sum of `tensor` has arrived.

        Raises:
            CommunicationError: after `timeout_s`.
            GradlaneError: the engine's failure.
        """
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while self._parts[tensor]:
                self._check()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise CommunicationError(
                        f"iteration {self.iteration}: no sum of {self.plan.tensors[tensor].name} within {timeout_s:.0f} s; "
                        f"{self._dispatcher.describe_state()}; is another rank slow, or gone?"
                    )
                self._condition.wait(left_s)

    def wait_for_all(self, timeout_s: float = 60.0) -> None:
        """Return when every sum of this iteration has arrived; `timeout_s` is for each."""
        for tensor in range(len(self._parts)):
            self.wait(tensor, timeout_s)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _start(self, messages: list[int]) -> None:
        """Start in the order given; messages that become startable within `Engine.start` follow
        from this loop.
        """
        self._to_start.extend(messages)
        if self._starting:
            return
        self._starting = True
        try:
            while self._to_start:
                self._engine.start(self._to_start.popleft())
        finally:
            self._starting = False
