"""Dispatcher: facts in, starts out. This is the specification; `native.py` has what runs.

A Dispatcher turns "this tensor is ready" and "this message is done" into "start these messages
now", under one Plan. It has no clock, no thread and no I/O. It never blocks, and never raises for a
legal history of facts. Its driver owns it alone: the simulator in virtual time, or the live session
under its lock. Both drive the same rules in native code (`NativeDispatcher`), and tests hold the two
to the same answers.

The rules, for each lane:
  1. A message is eligible when all its tensors are ready, and also the tensor that it is held for,
     if there is one.
  2. Eligible messages start by priority, the smallest first. Ties go to the message that became
     eligible first.
  3. The most urgent eligible message starts if the lane's window has room for it. If nothing is in flight on the lane
     it starts too, so that a message larger than the window can go. If it does not fit, no other message may pass it,
     because that would invert priorities.
  4. With a sequence (planned ahead, or told by a coordinator), the next message to start is the
     next of the sequence, whichever others are eligible. The window holds as well.
  5. A two-phase message finishes twice. Its second half is eligible once every message of the plan
     has finished for the first time. Second halves start by priority, with a sequence too.
  6. A second half that has a place in the sequence starts there, once its own first half has finished.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from gradlane.core.plan import Plan


class Dispatcher:
    """Scheduling of one plan, iteration after iteration."""

    def __init__(self, plan: Plan, *, follow: bool = False) -> None:
        """Prepare for the first `begin`.

        Args:
            plan: what to carry out.
            follow: take the order of messages from a coordinator, by `allow`, instead of from the
                plan.
        """
        self.plan = plan
        self._sizes = [message.size_bytes for message in plan.messages]
        self._lane_of = [message.lane for message in plan.messages]
        self._windows = [lane.window_bytes for lane in plan.lanes]
        self._waiters: list[list[int]] = [[] for _ in plan.tensors]
        self._needs_at_first: list[int] = []
        for index, message in enumerate(plan.messages):
            needed = set(message.tensors)
            if message.hold_until is not None:
                needed.add(message.hold_until)
            self._needs_at_first.append(len(needed))
            for tensor in needed:
                self._waiters[tensor].append(index)
        self._second_halves = plan.late_second_phases
        self._ordered = follow or plan.sequence is not None
        self._orders_at_first: list[list[tuple[int, bool]]] = [[] for _ in plan.lanes]  # message, whether its second half
        if not follow:
            for index, is_second in plan.starts:
                self._orders_at_first[self._lane_of[index]].append((index, is_second))
        self._reset()

    def _reset(self) -> None:
        lanes = len(self._windows)
        self._needs = list(self._needs_at_first)
        self._is_ready = [False] * len(self._waiters)
        self._queues: list[list[tuple[int, int, int]]] = [[] for _ in range(lanes)]  # (priority, arrival, message)
        self._orders = [list(order) for order in self._orders_at_first]
        self._next = [0] * lanes
        self._in_flight_bytes = [0] * lanes
        self._in_flight: dict[int, None] = {}  # in the order of their starts
        self._arrivals = 0
        self._unfinished = len(self._sizes)
        self._unreduced = len(self._sizes)
        self._reduced: set[int] = set()

    # -- facts ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a new iteration; the one before must have finished."""
        assert self.done or not any(self._is_ready), f"an iteration is still under way: {self.describe_state()}"
        self._reset()

    def ready(self, tensor: int) -> list[int]:
        """Take the fact that the gradient of `tensor` is ready.

        Returns the messages to start now, in order.
        """
        assert not self._is_ready[tensor], f"tensor {tensor} became ready twice in one iteration"
        self._is_ready[tensor] = True
        touched = set()
        for message in self._waiters[tensor]:
            self._needs[message] -= 1
            if self._needs[message] == 0:
                lane = self._lane_of[message]
                touched.add(lane)
                if not self._ordered:
                    heapq.heappush(self._queues[lane], (self.plan.messages[message].priority, self._arrivals, message))
                    self._arrivals += 1
        return [message for lane in sorted(touched) for message in self._start(lane)]

    def finished(self, message: int) -> list[int]:
        """Take the fact that `message`, or half of it, has finished.

        Returns the messages to start now, in order.
        """
        del self._in_flight[message]
        lane = self._lane_of[message]
        self._in_flight_bytes[lane] -= self._sizes[message]
        if message in self._reduced:
            self._unfinished -= 1
            return self._start(lane)
        self._unreduced -= 1
        if self.plan.messages[message].two_phase:
            self._reduced.add(message)
        else:
            self._unfinished -= 1
        if self._unreduced or not self._second_halves:
            return self._start(lane)
        self._queue_second_halves()
        return [start for lane in range(len(self._windows)) for start in self._start(lane)]

    def _queue_second_halves(self) -> None:
        for message in self._second_halves:
            lane = self._lane_of[message]
            if self._ordered:
                self._orders[lane].append((message, True))
            else:
                heapq.heappush(self._queues[lane], (self.plan.messages[message].priority, self._arrivals, message))
                self._arrivals += 1

    def allow(self, message: int) -> list[int]:
        """Take the fact that the coordinator put `message` next (`follow`).

        Returns the messages to start now, in order.
        """
        lane = self._lane_of[message]
        self._orders[lane].append((message, False))
        return self._start(lane)

    # -- what an owner may ask ---------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether every message of this iteration has finished."""
        return self._unfinished == 0

    def blocking(self) -> list[int]:
        """Of each lane whose next message waits for room in the window, the message in flight that started first.

        Nothing else that ends can make room sooner, where messages of a lane end in the order of their starts.
        """
        lanes = [lane for lane in range(len(self._windows)) if self._head(lane) is not None]
        return [next(message for message in self._in_flight if self._lane_of[message] == lane) for lane in lanes]

    def in_second_phase(self, message: int) -> bool:
        """Whether `message` is two-phase and its first half has finished."""
        return message in self._reduced

    @property
    def in_flight(self) -> frozenset[int]:
        """The messages that were started and have not finished."""
        return frozenset(self._in_flight)

    def describe_state(self) -> str:
        """The messages in flight and the gradients that are missing, as text for error messages."""
        missing = [tensor for tensor, ready in enumerate(self._is_ready) if not ready]
        return describe_state(self.plan, self._unfinished, self.in_flight, missing)

    # -- the decision --------------------------------------------------------------------------------

    def _start(self, lane: int) -> list[int]:
        starts: list[int] = []
        while True:
            message = self._head(lane)
            if message is None:
                return starts
            window = self._windows[lane]
            used = self._in_flight_bytes[lane]
            if window is not None and used > 0 and used + self._sizes[message] > window:
                return starts
            if self._ordered:
                self._next[lane] += 1
            else:
                heapq.heappop(self._queues[lane])
            self._in_flight[message] = None
            self._in_flight_bytes[lane] = used + self._sizes[message]
            starts.append(message)

    def _head(self, lane: int) -> int | None:
        if not self._ordered:
            queue = self._queues[lane]
            return queue[0][2] if queue else None
        order, place = self._orders[lane], self._next[lane]
        if place == len(order):
            return None
        message, is_second = order[place]
        is_eligible = message in self._reduced if is_second else self._needs[message] == 0
        return message if is_eligible else None


def describe_state(plan: Plan, unfinished: int, in_flight: Iterable[int], missing: Sequence[int]) -> str:
    """What a Dispatcher says of itself, as text for error messages.

    Args:
        plan: what it carries out.
        unfinished: how many messages have not finished.
        in_flight: messages that were started and have not finished.
        missing: tensors that are not ready.
    """
    text = f"{unfinished} of {len(plan.messages)} messages unfinished, under way: {sorted(in_flight)}"
    if missing:
        text += f", {len(missing)} gradients not ready, the first {plan.tensors[missing[0]].name}"
    return text
