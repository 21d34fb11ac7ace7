"""Work: a collective in flight, and the thread that completes the futures of works that were asked
for one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradlane.errors import CommunicationError, JobError
from gradlane.live.c10d.profiling import end
from gradlane.transport import Node


class Work(dist.Work):
    """What a collective returns, as torch.distributed's own works.

    The collective's memory is in use until `wait()` returns or `is_completed()` is true.

    Args:
        node: that carries the collective.
        futures: completes the future, if one is asked for.
        ids: of the node's tensors that the collective consists of.
        tensors: the result.
        held: keeps the memory of the node's tensors alive.
        timeout_s: seconds after which `wait()` fails the group.
        finish: called once, by whoever finds the collective ended first, to bring the result into
            `tensors`.
        kept: where this object stays until somebody has heard of the end; None if torch keeps it.
        entry: of a profiler, see `profiling.begin`.
    """

    def __init__(
        self,
        node: Node,
        futures: Futures,
        ids: range,
        tensors: list[torch.Tensor],
        held: list[torch.Tensor],
        timeout_s: float,
        finish: Callable[[], None],
        kept: set[Work] | None,
        entry: Any = None,
    ) -> None:
        super().__init__()
        self._node, self._futures, self._ids, self._tensors = node, futures, ids, tensors
        self._held, self._timeout_s, self._finish = held, timeout_s, finish
        self._over = False
        self._error: JobError | None = None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._kept, self._entry = kept, entry
        if kept is not None:
            kept.add(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result.

        Args:
            timeout: replaces the collective's own, if it is more than 0.

        Returns:
            True.

        Raises:
            JobError: the group has failed, or the time is up. The group cannot be used any more.
        """
        if self._over:
            return True
        given_s = timeout.total_seconds() if timeout is not None else 0.0
        timeout_s = given_s if given_s > 0 else self._timeout_s
        try:
            self._await(timeout_s)
        except JobError as error:
            self._error = error
            # a timeout: abort, so that nothing is written to this memory later
            if self._node.failure() is None:
                self._node.abort(str(error))
            self._has_been_heard_of()
            raise
        self._conclude()
        return True

    def _await(self, timeout_s: float) -> None:
        for each in self._ids:
            self._node.wait(each, timeout_s)

    def is_completed(self) -> bool:
        """Whether the collective has ended, with its result or by a failure of the group."""
        if not self._over and self.is_sent():
            self._conclude()
        return self._over or self._node.failure() is not None

    def is_sent(self) -> bool:
        """Whether the node no longer uses the collective's memory."""
        return all(self._node.is_done(each) for each in self._ids)

    def is_success(self) -> bool:
        return self.is_completed() and self._over

    def exception(self) -> Any:
        return self._error or (None if self._over else self._node.failure())

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of result tensors; a failure is its exception."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                self._futures.add(self)
            return self._future

    def resolve(self) -> None:
        """Wait, then complete the future."""
        assert self._future is not None
        try:
            self.wait()
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._tensors)

    def _conclude(self) -> None:
        with self._lock:
            if self._over:
                return
            self._finish()
            self._held.clear()
            self._over = True
            if self._entry is not None:
                end(self._entry)
        self._has_been_heard_of()

    def _has_been_heard_of(self) -> None:
        if self._kept is not None:
            self._kept.discard(self)


class Futures:
    """Completes the futures of works, in the order in which they were asked for.

    Owns one thread, which is started with the first future. A callback of a future runs on it, and may start a call and
    wait for it, as PowerSGD's hook does. Another thread then goes on with the queue, and this one ends with its callback.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # that takes from the queue
        self._relieved: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def add(self, work: Work) -> None:
        """Complete the future of `work` when it has ended. Raises `CommunicationError` if closed."""
        with self._lock:
            if self._closed:
                raise CommunicationError("the process group is closed")
            if self._thread is threading.current_thread():
                self._relieved = [*filter(threading.Thread.is_alive, self._relieved), self._thread]
                self._thread = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gradlane-c10d", daemon=True)
                self._thread.start()
        self._asked.put(work)

    def close(self) -> None:
        """End the thread once all futures are complete. Close the node first: that ends all works."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._asked.put(None)
        for each in (*self._relieved, *filter(None, [thread])):
            if each is not threading.current_thread():
                each.join()

    def _run(self) -> None:
        while (work := self._asked.get()) is not None:
            work.resolve()
            if threading.current_thread() in self._relieved:
                return
