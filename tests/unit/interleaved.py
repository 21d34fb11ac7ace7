"""Threads that take turns line by line: which one goes on is drawn from a seed, so that each run can be repeated.

A thread hands over at each line of the files that are watched, and wherever it waits. One thread runs at a time.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_MOST_TURNS = 20_000  # hundreds of times as many as a job takes


class DeadlockError(Exception):
    """No thread can go on, or all go on for ever."""


class _Stopped(BaseException):
    """Another thread has failed."""


class Threads:
    """Threads under one seed.

    Args:
        rng: draws who goes on.
        files: whose lines are places to hand over.
        switch: how likely a thread hands over at a line.
    """

    def __init__(self, rng: random.Random, files: frozenset[str], switch: float = 0.2) -> None:
        self._rng, self._files, self._switch = rng, files, switch
        self._doors: dict[int, threading.Semaphore] = {}
        self._weights: dict[int, int] = {}  # how often each goes on: one may overtake the others by far
        self._waits: dict[int, Callable[[], bool]] = {}  # of the threads that have not ended
        self._here = threading.local()
        self._running: list[tuple[int, Callable[[], None]]] = []
        self._turns = 0
        self._chooses = False
        self.error: BaseException | None = None
        self.at_line: Callable[[], None] = lambda: None
        """Called at each line, by the thread that is there."""

    def add(self, work: Callable[[], None]) -> None:
        """Have `work` run in a thread of its own."""
        number = len(self._doors)
        self._doors[number] = threading.Semaphore(0)
        self._weights[number] = 1
        self._waits[number] = lambda: True
        self._running.append((number, work))

    def run(self) -> None:
        """Run all, and raise the first error of any of them."""
        self._weights[self._rng.choice(list(self._weights))] = self._rng.choice((1, 10, 100))
        threads = [threading.Thread(target=self._thread, args=each) for each in self._running]
        for thread in threads:
            thread.start()
        self._doors[self._rng.choice(list(self._doors))].release()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def _thread(self, number: int, work: Callable[[], None]) -> None:
        self._here.number = number
        self._doors[number].acquire()
        try:
            if self.error is None:
                sys.settrace(self._trace)
                work()
        except _Stopped:
            pass
        except BaseException as error:
            self.error = self.error or error
        finally:
            sys.settrace(None)
            del self._waits[number]
            self._let_go(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line" and not self._chooses:  # else the line is of what another thread waits for
            self._take()
            self.at_line()
            if self._rng.random() < self._switch:
                self.wait(lambda: True)
        return self._trace

    def _take(self) -> None:
        self._turns += 1
        if self._turns > _MOST_TURNS:
            raise DeadlockError("threads go on for ever")

    def wait(self, holds: Callable[[], bool]) -> None:
        """Let other threads go on until `holds()`."""
        self._take()
        number = self._here.number
        self._waits[number] = holds
        if self._let_go(number):
            self._doors[number].acquire()
        if self.error is not None:
            raise _Stopped
        self._waits[number] = lambda: True

    def _let_go(self, number: int | None) -> bool:
        """Let a thread go on that can; whether that is another one than `number`."""
        self._chooses = True
        ready = [each for each, holds in self._waits.items() if self.error is not None or holds()]
        self._chooses = False
        if not ready and self._waits:
            self.error = DeadlockError("no thread can go on")
            ready = list(self._waits)
        if not ready:
            return False
        following = self._rng.choices(ready, [self._weights[each] for each in ready])[0]
        if following == number:
            return False
        self._doors[following].release()
        return True


class Turn:
    """A reentrant lock of such threads, which is given up while waiting."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._owner: int | None = None
        self._times = 0

    @property
    def is_here(self) -> bool:
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        if not self.is_here:
            self._threads.wait(lambda: self._owner is None)
            self._owner = threading.get_ident()
        self._times += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._times -= 1
        if not self._times:
            self._owner = None

    @contextmanager
    def given_up(self) -> Iterator[None]:
        if not self.is_here:
            yield
            return
        times, self._times, self._owner = self._times, 0, None
        try:
            yield
        finally:
            self._threads.wait(lambda: self._owner is None)
            self._owner, self._times = threading.get_ident(), times
