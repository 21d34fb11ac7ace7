"""Engine: carries one plan out, by a Dispatcher between the owner of the gradients and the backend that sums them.

A session and a plugin each own one. The engine turns the Dispatcher's answers into calls of its owner. It starts
messages one after another, in the order of the answers, and counts the messages of each tensor that have not arrived.
It has no thread, no clock and no I/O; its owner calls it under one lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from gradlane.core.plan import Plan
from gradlane.core.records.dispatch_log import Log
from gradlane.schedule.log import LoggedDispatcher
from gradlane.schedule.native import NativeDispatcher


class Owner(Protocol):
    """What moves the messages of a plan and hears what became of them. Called under the owner's own lock."""

    def start(self, message: int, second_phase: bool) -> bool:
        """Begin the sum of `message`, or, of a two-phase message, its second phase; never block.

        Returns:
            Whether it has ended already. Otherwise its end is told by `Engine.ended`, from within this call too.
        """
        ...

    def left(self, message: int) -> None:
        """`message` has left its lane's window; whatever that makes room for is started after this call."""

    def arrived(self, message: int) -> None:
        """The sum of `message` is in the memory of its tensors."""


class Engine:
    """The messages of one plan on their way, iteration after iteration.

    Args:
        plan: what is carried out.
        owner: starts messages and hears of them.
        follow: the order of messages comes by `allow` from a coordinator instead of from the plan.
        keeps_log: keep the last iterations' facts and answers, see `log`.

    Attributes:
        missing: how many messages of this iteration have not arrived.
        in_second_phase: whether a message is of two phases and the first has ended.
        blocking: of each lane whose next message waits for room in the window, the message under way that started first.
    """

    def __init__(self, plan: Plan, owner: Owner, *, follow: bool = False, keeps_log: bool = False) -> None:
        self.plan = plan
        self._owner = owner
        self._dispatcher = (LoggedDispatcher if keeps_log else NativeDispatcher)(plan, follow=follow)
        self._messages_of = plan.messages_by_tensor
        self._tensors_of = plan.tensors_by_message
        self.in_second_phase, self.blocking = self._dispatcher.in_second_phase, self._dispatcher.blocking
        self._has_two_phases = bool(plan.second_phases)
        self.missing = 0
        self._missing_of = [0] * len(plan.tensors)  # messages of each tensor that have not arrived
        self._sent: set[int] = set()  # messages that left their windows before their sums arrived
        self._to_start: deque[int] = deque()
        self._is_starting = False

    # -- facts -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new iteration begins; every message of the one before has arrived."""
        self._missing_of = [len(messages) for messages in self._messages_of]
        self.missing = len(self._tensors_of)
        self._sent.clear()
        self._dispatcher.begin()

    def ready(self, tensors: Sequence[int]) -> None:
        """The gradients of `tensors` are in their memory."""
        messages: list[int] = []
        for tensor in tensors:
            messages += self._dispatcher.ready(tensor)
        if messages:
            self._start(messages)

    def allow(self, message: int) -> None:
        """The coordinator put `message` next."""
        self._start(self._dispatcher.allow(message))

    def sent(self, message: int) -> None:
        """This process's part of `message` has been sent: the message leaves its window now rather than with its sum.

        For transports that tell messages apart by their content, where ranks may start them in different orders.
        """
        self._sent.add(message)
        self._leave(message)

    def ended(self, message: int) -> None:
        """The sum of `message` is there, or the first phase of a two-phase message has ended."""
        two_phase = self._has_two_phases and self.plan.messages[message].two_phase
        if two_phase and not self._dispatcher.in_second_phase(message):
            self._leave(message)
            return
        for tensor in self._tensors_of[message]:
            self._missing_of[tensor] -= 1
        self.missing -= 1
        if not two_phase and message not in self._sent:
            self._leave(message)
        self._owner.arrived(message)
        if two_phase:
            self._start(self._dispatcher.finished(message))

    # -- questions --------------------------------------------------------------------------------------

    def has_arrived(self, tensor: int) -> bool:
        """Whether every message of `tensor` has arrived."""
        return not self._missing_of[tensor]

    def late(self, tensors: Sequence[int]) -> list[int]:
        """Those of `tensors` that have not arrived."""
        return [tensor for tensor in tensors if self._missing_of[tensor]] if self.missing else []

    @property
    def all_arrived(self) -> bool:
        """Whether every message of this iteration has arrived."""
        return not self.missing

    def messages_of(self, tensor: int) -> list[int]:
        """The messages in which `tensor` travels."""
        return self._messages_of[tensor]

    def describe_state(self) -> str:
        """Describe the messages in flight and awaited, for errors."""
        return self._dispatcher.describe_state()

    @property
    def log(self) -> Log | None:
        """The facts of the last iterations and what the Dispatcher answered; None where no log is kept."""
        return self._dispatcher.log if isinstance(self._dispatcher, LoggedDispatcher) else None

    # -- starting ---------------------------------------------------------------------------------------

    def _leave(self, message: int) -> None:
        self._owner.left(message)
        following = self._dispatcher.finished(message)
        if following:
            self._start(following)

    def _start(self, messages: list[int]) -> None:
        self._to_start.extend(messages)
        if self._is_starting:  # a message ended while it was being started: the loop below continues with what it freed
            return
        self._is_starting = True
        try:
            while self._to_start:
                message = self._to_start.popleft()
                second_phase = self._has_two_phases and self._dispatcher.in_second_phase(message)
                if self._owner.start(message, second_phase):
                    self.ended(message)
        finally:
            self._is_starting = False
