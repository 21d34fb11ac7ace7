"""Held: a network whose sums arrive as late as they may, in the same order in every run.

On loopback sums come before `step()`, with a delay they come when the machine lets them. Here the end of a sum is held back
until the training thread waits for one, and then no more of them are let through than it waits for: whatever can be deferred
is deferred, and nothing that a loop reads has arrived by chance.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from gradlane.live.backends.parameter_server import ParameterServerBackend
from gradlane.live.comm.failures import Failures
from gradlane.live.remote_update.iterations import ServedIterations
from tests.live.networks import Heard, HidingEngine, all_reduce_heard, what_is_there

AT_MOST_S = 0.05
"""How long an end is held where nobody waits for it: a rank inside a collective of the script's own waits for nothing of
gradlane's, and the other rank may need its next messages before it gets there.
"""

End = Callable[[], None]


class Gate:
    """Through which the ends of sums go; used by the training thread and by those of the backends."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: deque[tuple[float, End]] = deque()
        self._wanted: Callable[[], bool] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._let_through_what_is_old, daemon=True)
        self._thread.start()

    def ended(self, end: End) -> None:
        with self._changed:
            wanted = self._wanted
            if (wanted is None or wanted()) and not self._closed:
                self._held.append((time.monotonic() + AT_MOST_S, end))
                self._changed.notify_all()
                return
        end()

    @contextlib.contextmanager
    def wanted(self, arrived: Callable[[], bool]) -> Iterator[None]:
        """While the training thread waits until `arrived()`."""
        with self._changed:
            self._wanted = arrived
        try:
            while not arrived():
                with self._changed:
                    if not self._held:
                        break
                    _, end = self._held.popleft()
                end()
            yield
        finally:
            with self._changed:
                self._wanted = None

    def _let_through_what_is_old(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._held or self._held[0][0] > time.monotonic()):
                    self._changed.wait(self._held[0][0] - time.monotonic() if self._held else None)
                if not self._held:
                    return
                _, end = self._held.popleft()
            end()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()


@contextlib.contextmanager
def held_network(holds: Callable[[int], bool]) -> Iterator[None]:
    """Sessions attached inside hear of the end of message `i` late where `holds(i)`, else at once."""
    gate = Gate()
    wait_until = Failures.wait_until

    def waits(self: Failures, predicate: Callable[[], bool], what: str, **how: bool) -> None:
        # a wait for anything but sums lets none through: the broadcast of buffers says nothing of gradients
        with gate.wanted(predicate) if what.startswith(("the sum", "the norms")) else contextlib.nullcontext():
            wait_until(self, predicate, what, **how)

    def late(on_done: Any) -> Any:
        def ended(message: int, error: BaseException | None) -> None:
            if error is None and holds(message):
                gate.ended(lambda: on_done(message, None))
            else:
                on_done(message, error)

        return ended

    class Held(Heard):
        def hears(self, on_done: Any) -> Any:
            return late(on_done)

        def start_second_phase(self, message: int, on_done: Any) -> bool:
            if super().start_second_phase(message, on_done):
                late(on_done)(message, None)
            return False

    class HeldServers(ParameterServerBackend):
        """Where no engine carries a plan out, as one whose tensors have owners."""

        def prepare(self, plan: Any, buffers: Any) -> Any:
            return Held(super().prepare(plan, buffers))

    class HeldEngine(HidingEngine):
        """The engine of a node: a tensor has arrived once it was waited for, if any of its messages is held."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._waited_for: set[int] = set()

        def begin(self, iteration: int) -> None:
            self._waited_for.clear()
            super().begin(iteration)

        def has_arrived(self, tensor: int) -> bool:
            is_held = tensor not in self._waited_for and any(map(holds, self.plan.messages_by_tensor[tensor]))
            return not is_held and super().has_arrived(tensor)

        @property
        def all_arrived(self) -> bool:
            return all(map(self.has_arrived, range(len(self.plan.tensors))))

        def wait(self, tensor: int | None, interruptions: int, timeout_s: float) -> bool:
            if not super().wait(tensor, interruptions, timeout_s):
                return False
            self._waited_for.update(range(len(self.plan.tensors)) if tensor is None else [tensor])
            return True

    with (
        patch("gradlane.live.backends.parameter_server.NodeEngine", HeldEngine),
        patch("gradlane.live.remote_update.values.NodeEngine", HeldEngine),
        patch("gradlane.live.startup.attach.AllReduceBackend", all_reduce_heard(Held)),
        patch("gradlane.live.startup.attach.ParameterServerBackend", HeldServers),
        patch.object(Failures, "wait_until", waits),
        patch.object(Failures, "wait_briefly_in", what_is_there),
    ):
        try:
            yield
        finally:
            gate.close()


@contextlib.contextmanager
def counting_values_that_come_later() -> Iterator[list[int]]:
    """Yields a list that gets, for each step whose update is on the servers, how many values have not come."""
    seen: list[int] = []
    really = ServedIterations.after_step

    def after_step(self: ServedIterations, *args: Any) -> None:
        really(self, *args)
        seen.append(len(self._updates))

    with patch.object(ServedIterations, "after_step", after_step):
        yield seen
