"""Core: one plan carried out for one framework, through the four calls of ByteScheduler's CommTask (SOSP '19 §3.2).

    the core to the framework        `Engine.partition`   these messages exist, and what is in each
                                     `Engine.start`       begin this one now
    the framework to the core        `Core.notify_ready`  the gradient of this tensor is in its memory
                                     `Core.notify_finish` this message's sum is there

A CommTask is a tensor and its parts there; a message here may as well be several tensors merged, so that the calls name
tensors of the plan where readiness is meant and messages of it where bytes are moved.
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
    """What a framework offers: sums of messages, on whatever carries them."""

    def partition(self, plan: Plan, core: Core) -> None:
        """Prepare the messages of `plan`. Raises `PlanError` for what cannot be honoured. Called once, before all else."""
        ...

    def start(self, message: int) -> None:
        """Begin the sum of `message` over all ranks; never blocks.

        Its end is told by `core.notify_finish`, on any thread, once; from inside of this call too. Starts come one after
        another, in the order of the plan's priorities and windows. A two-phase message is started twice, its second half
        when its first has ended (or, by `core.notify_sent`, been sent).
        """
        ...


class Core:
    """Schedules the messages of one plan, iteration after iteration. Any thread may call anything.

    Where ranks must start messages in one order (collectives), hand in a plan with a sequence; whatever tells
    messages apart by what they are of (gradlane's transport) needs none.
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
        self._parts = [0] * len(plan.tensors)  # messages of each tensor whose sums are not there
        self._sent: set[int] = set()
        self._to_start: deque[int] = deque()
        self._starting = False
        self._failure: GradlaneError | None = None
        self.iteration = -1
        engine.partition(plan, self)

    def begin(self) -> None:
        """A new iteration; every sum of the one before must have been waited for."""
        with self._condition:
            self._check()
            assert not any(self._parts), f"iteration {self.iteration} is under way: {self._dispatcher.describe_state()}"
            self.iteration += 1
            self._parts = list(self._parts_at_first)
            self._sent.clear()
            self._dispatcher.begin()

    def notify_ready(self, tensor: int) -> None:
        """The gradient of `tensor` is in its memory, which belongs to the engine until its sum is there."""
        with self._condition:
            self._check()
            self._start(self._dispatcher.ready(tensor))

    def notify_sent(self, message: int) -> None:
        """This rank's part of `message` is on its way: it leaves its window now, rather than with its sum.

        For engines whose ranks start messages in orders of their own, and would wait for one another otherwise.
        """
        with self._condition:
            self._sent.add(message)
            self._start(self._dispatcher.finished(message))

    def notify_finish(self, message: int) -> None:
        """The sum of `message` is in the memory of its tensors; or the first half of a two-phase message has ended."""
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
        """No more sums will come: whatever waits, and every later call, raises the first `error`."""
        with self._condition:
            self._failure = self._failure or error
            self._condition.notify_all()

    def has_arrived(self, tensor: int) -> bool:
        """Whether the sum of `tensor` is there, without waiting."""
        return self._parts[tensor] == 0

    def wait(self, tensor: int, timeout_s: float = 60.0) -> None:
        """Return when the sum of `tensor` is there. Raises the failure, or `CommunicationError` after `timeout_s`."""
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
        """Return when every sum of this iteration is there; `timeout_s` is for each."""
        for tensor in range(len(self._parts)):
            self.wait(tensor, timeout_s)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _start(self, messages: list[int]) -> None:
        """In the order given; what ends inside of `Engine.start` frees others, which follow from the same loop."""
        self._to_start.extend(messages)
        if self._starting:
            return
        self._starting = True
        try:
            while self._to_start:
                self._engine.start(self._to_start.popleft())
        finally:
            self._starting = False
