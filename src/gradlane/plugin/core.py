"""Core: one plan carried out for one framework, through the four calls of ByteScheduler's CommTask (SOSP '19, section 3.2).

    the core to the framework        `Summation.partition`  these messages exist, and what is in each
                                     `Summation.start`      begin this one now
    the framework to the core        `Core.notify_ready`    the gradient of this tensor is in its memory
                                     `Core.notify_finish`   this message's sum is there

A CommTask is a tensor with its partitions. A message here may also be several tensors merged, so tensors become
ready, and messages start and end.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from gradlane.core.plan import Plan
from gradlane.errors import CommunicationError, GradlaneError
from gradlane.schedule import Engine


class Summation(Protocol):
    """What a framework offers: sums of messages, on whatever carries them."""

    def partition(self, plan: Plan, core: Core) -> None:
        """Prepare the messages of `plan`. Raises `PlanError` for what cannot be honoured. Called once, before all else."""
        ...

    def start(self, message: int) -> None:
        """Begin the sum of `message` over all ranks; never block.

        Its end is told by `core.notify_finish`, on any thread, once; from inside of this call too. Starts come one after
        another, in the order of the plan's priorities and windows. A two-phase message is started twice, its second phase
        when its first has ended (or, by `core.notify_sent`, been sent).
        """
        ...


class Core:
    """Schedules the messages of one plan, iteration after iteration. Any thread may call anything.

    Where ranks must start messages in one order (collectives), hand in a plan with a sequence; a transport that tells
    messages apart by their content (gradlane's own) needs none.
    """

    def __init__(self, plan: Plan, summation: Summation) -> None:
        self.plan = plan
        self._summation = summation
        self._condition = threading.Condition(threading.RLock())
        self._failure: GradlaneError | None = None
        self._engine = Engine(plan, self)
        self.iteration = -1
        summation.partition(plan, self)

    # -- what the engine asks for, under the lock -------------------------------------------------------

    def start(self, message: int, second_phase: bool) -> bool:
        """Hand `message` to the framework, which tells its end by `notify_finish`."""
        self._summation.start(message)
        return False

    def left(self, message: int) -> None:
        """Nobody waits for a message to leave its window."""

    def arrived(self, message: int) -> None:
        """Wake all threads that wait for a sum."""
        self._condition.notify_all()

    # -- what the framework tells --------------------------------------------------------------------------

    def begin(self) -> None:
        """A new iteration; every sum of the one before must have been waited for."""
        with self._condition:
            self._check()
            assert self._engine.all_arrived, f"iteration {self.iteration} is under way: {self._engine.describe_state()}"
            self.iteration += 1
            self._engine.begin()

    def notify_ready(self, tensor: int) -> None:
        """The gradient of `tensor` is in its memory, which belongs to the summation until its sum is there."""
        with self._condition:
            self._check()
            self._engine.ready((tensor,))

    def notify_sent(self, message: int) -> None:
        """This rank's part of `message` is on its way: it leaves its window now, rather than with its sum.

        For transports whose ranks start messages in orders of their own, and would wait for one another otherwise.
        """
        with self._condition:
            self._engine.sent(message)

    def notify_finish(self, message: int) -> None:
        """The sum of `message` is in the memory of its tensors; or the first phase of a two-phase message has ended."""
        with self._condition:
            self._engine.ended(message)

    def notify_failure(self, error: GradlaneError) -> None:
        """No more sums will come: whatever waits, and every later call, raises the first `error`."""
        with self._condition:
            self._failure = self._failure or error
            self._condition.notify_all()

    # -- waiting --------------------------------------------------------------------------------------------

    def has_arrived(self, tensor: int) -> bool:
        """Whether the sum of `tensor` is there, without waiting."""
        return self._engine.has_arrived(tensor)

    def wait(self, tensor: int, timeout_s: float = 60.0) -> None:
        """Return when the sum of `tensor` is there. Raises the failure, or `CommunicationError` after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while not self._engine.has_arrived(tensor):
                self._check()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise CommunicationError(
                        f"iteration {self.iteration}: no sum of {self.plan.tensors[tensor].name} within {timeout_s:.0f} s; "
                        f"{self._engine.describe_state()}; is another rank slow, or gone?"
                    )
                self._condition.wait(left_s)

    def wait_for_all(self, timeout_s: float = 60.0) -> None:
        """Return when every sum of this iteration is there; `timeout_s` is for each."""
        for tensor in range(len(self.plan.tensors)):
            self.wait(tensor, timeout_s)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
