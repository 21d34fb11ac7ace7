"""Work: one collective under way, and the thread that resolves futures for those who asked for one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradlane.errors import CommunicationError, JobError
from gradlane.transport import Node


class Work(dist.Work):
    """What a collective returns. Its memory is in use until `wait()` has returned or `is_completed()` said so.

    tensors: the result. ids: of the node's tensors, all of which must be done. held: keeps their memory alive.
    finish: what remains to be done on the result, once, by whoever waits first.
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
    ) -> None:
        super().__init__()
        self._node, self._futures, self._ids, self._tensors = node, futures, ids, tensors
        self._held, self._timeout_s, self._finish = held, timeout_s, finish
        self._over = False
        self._error: JobError | None = None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True when the result is there. Raises a `JobError`; after one, the whole group is of no more use."""
        if self._over:
            return True
        given_s = timeout.total_seconds() if timeout is not None else 0.0
        timeout_s = given_s if given_s > 0 else self._timeout_s
        try:
            for each in self._ids:
                self._node.wait(each, timeout_s)
        except JobError as error:
            self._error = error
            if self._node.failure() is None:  # nobody's, but the time is up: what arrives later must harm nobody
                self._node.abort(str(error))
            raise
        self._conclude()
        return True

    def is_completed(self) -> bool:
        """Whether the result is there or never will be."""
        if not self._over and self.is_sent():
            self._conclude()
        return self._over or self._node.failure() is not None

    def is_sent(self) -> bool:
        """Whether the node is done with the memory."""
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
        """Resolves to the list of result tensors, or to the error."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                self._futures.add(self)
            return self._future

    def resolve(self) -> None:
        """Wait, and settle the future."""
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


class Futures:
    """Resolves works in the order in which their futures were asked for; has a thread from the first one on."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def add(self, work: Work) -> None:
        with self._lock:
            if self._closed:
                raise CommunicationError("the process group is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gradlane-c10d", daemon=True)
                self._thread.start()
        self._asked.put(work)

    def close(self) -> None:
        """End the thread after what was asked for; for that to be soon, the node must be closed."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._asked.put(None)
            thread.join()

    def _run(self) -> None:
        while (work := self._asked.get()) is not None:
            work.resolve()
