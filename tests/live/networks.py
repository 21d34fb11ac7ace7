"""A network that is slow in a known way, so that sums are still under way when `step()` is called."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

from gradlane.core.timeline import Kind
from gradlane.live.backends.all_reduce import AllReduceBackend
from gradlane.live.backends.base import Sums
from gradlane.live.comm.failures import Failures
from gradlane.live.session.deferred_step import DeferredStep
from gradlane.transport import NodeEngine


class Heard:
    """The real sums of a plan, of whose ends a session hears as a subclass wants it."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sums, name)

    def start(self, message: int, ready: Any, on_done: Any, on_sent: Any) -> bool:
        return self._sums.start(message, ready, self.hears(on_done), on_sent)

    def start_second_phase(self, message: int, on_done: Any) -> bool:
        return self._sums.start_second_phase(message, self.hears(on_done))

    def hears(self, on_done: Any) -> Any:
        """What is called at an end in place of `on_done`."""
        return on_done


class Late(Heard):
    """Each end is heard `delay_s` later: on loopback they would all come before `step()`."""

    delay_s = 0.002

    def hears(self, on_done: Any) -> Any:
        def later(index: int, error: BaseException | None) -> None:
            timer = threading.Timer(self.delay_s, on_done, (index, error))
            timer.daemon = True
            timer.start()

        return later


class UntilAwaited(Heard):
    """The ends of first phases are heard as soon as somebody waits for them, and not before: no load of the machine changes
    what `step()` finds.
    """

    def __init__(self, sums: Sums) -> None:
        super().__init__(sums)
        self._kept_lock = threading.Lock()
        self._kept: dict[int, tuple[Any, BaseException | None]] = {}
        self._awaited: set[int] = set()

    def begin(self, expected: list[list[int]]) -> None:
        self._awaited.clear()
        self._sums.begin(expected)

    def start_second_phase(self, message: int, on_done: Any) -> bool:
        return self._sums.start_second_phase(message, on_done)

    def hears(self, on_done: Any) -> Any:
        def ended(message: int, error: BaseException | None) -> None:
            with self._kept_lock:
                if message not in self._awaited:
                    self._kept[message] = on_done, error
                    return
            on_done(message, error)

        return ended

    def await_ends(self, messages: Iterable[int]) -> None:
        messages = list(messages)
        self._sums.await_ends(messages)
        with self._kept_lock:
            self._awaited.update(messages)
            told = [(message, *self._kept.pop(message)) for message in messages if message in self._kept]
        for message, on_done, error in told:
            on_done(message, error)


def all_reduce_heard(heard: Callable[[Sums], Any]) -> type[AllReduceBackend]:
    """The real backend, whose plans' sums are given to `heard`."""

    class Backend(AllReduceBackend):
        def prepare(self, plan: Any, buffers: Any) -> Any:
            return heard(super().prepare(plan, buffers))

    return Backend


class HidingEngine(NodeEngine):
    """The engine of a node; a subclass says by `has_arrived` what has arrived."""

    def late(self, tensors: Sequence[int]) -> list[int]:
        return [tensor for tensor in tensors if not self.has_arrived(tensor)]


class UntilAwaitedEngine(HidingEngine):
    """Nothing has arrived until somebody waits for a tensor of the iteration, and then everything has: what `step()` defers is
    made together.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_awaited = False

    def begin(self, iteration: int) -> None:
        self._is_awaited = False
        super().begin(iteration)

    def has_arrived(self, tensor: int) -> bool:
        return self._is_awaited and super().has_arrived(tensor)

    @property
    def all_arrived(self) -> bool:
        return self._is_awaited and super().all_arrived

    def wait(self, tensor: int | None, interruptions: int, timeout_s: float) -> bool:
        self._is_awaited = super().wait(None, interruptions, timeout_s)
        return self._is_awaited


class LateEngine(HidingEngine):
    """What has arrived is said to have arrived `Late.delay_s` after the first question."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shown_from: dict[int, float] = {}
        self._iteration = -1

    def begin(self, iteration: int) -> None:
        self._shown_from.clear()
        self._iteration = iteration
        super().begin(iteration)

    def has_arrived(self, tensor: int) -> bool:
        if not super().has_arrived(tensor):
            return False
        return time.monotonic() >= self._shown_from.setdefault(tensor, time.monotonic() + Late.delay_s)

    def spans(self, *, last: bool) -> list[tuple[Kind, int, int, int, int]]:
        """Those of the node; a message of the iteration under way takes until one of its tensors is said to have arrived."""
        return [self._until_shown(*span) for span in super().spans(last=last)]

    def _until_shown(
        self, kind: Kind, iteration: int, subject: int, start_ns: int, end_ns: int
    ) -> tuple[Kind, int, int, int, int]:
        if kind == "receive" and iteration == self._iteration:
            shown = [self._shown_from.get(part.tensor, 0.0) for part in self.plan.messages[subject].slices]
            end_ns = max(end_ns, round(1e9 * min(shown)))
        return kind, iteration, subject, start_ns, end_ns

    @property
    def all_arrived(self) -> bool:
        return self._have_arrived(range(len(self.plan.tensors)))

    def wait(self, tensor: int | None, interruptions: int, timeout_s: float) -> bool:
        end, iteration = time.monotonic() + timeout_s, self._iteration
        if not super().wait(tensor, interruptions, timeout_s):
            return False
        tensors = range(len(self.plan.tensors)) if tensor is None else [tensor]
        while not self._have_arrived(tensors) and self._iteration == iteration:
            if time.monotonic() >= end:
                return False
            time.sleep(min(Late.delay_s, timeout_s) / 4)
        return True

    def _have_arrived(self, tensors: Iterable[int]) -> bool:
        asked = [self.has_arrived(tensor) for tensor in tensors]  # of all of them, so that their delays pass together
        return all(asked)


def what_is_there(failures: Failures, engine: NodeEngine, limit_ns: int) -> bool:
    """In place of `Failures.wait_briefly_in`, where nothing arrives because somebody waits briefly."""
    return engine.all_arrived


@contextlib.contextmanager
def network_until_awaited() -> Iterator[None]:
    """Sessions attached inside hear of no sum until somebody waits for one."""
    with (
        patch("gradlane.live.startup.attach.AllReduceBackend", all_reduce_heard(UntilAwaited)),
        patch("gradlane.live.backends.parameter_server.NodeEngine", UntilAwaitedEngine),
        patch.object(Failures, "wait_briefly_in", what_is_there),
    ):
        yield


@contextlib.contextmanager
def slow_network() -> Iterator[type[Late]]:
    """Sessions attached inside have a slow network; its `delay_s` may be changed."""
    with (
        patch("gradlane.live.startup.attach.AllReduceBackend", all_reduce_heard(Late)),
        patch("gradlane.live.backends.parameter_server.NodeEngine", LateEngine),
        patch.object(Late, "delay_s", Late.delay_s),
    ):
        yield Late


@contextlib.contextmanager
def counting_deferred_updates() -> Iterator[list[int]]:
    """Yields a list that gets, for each deferred update, how many parameters it was of."""
    seen: list[int] = []
    really = DeferredStep.update

    def update(self: DeferredStep, params: Any) -> None:
        params = list(params)
        seen.append(len(params))
        really(self, params)

    with patch.object(DeferredStep, "update", update):
        yield seen
