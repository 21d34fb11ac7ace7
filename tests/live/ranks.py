"""Real ranks for tests: processes that stay up, form one process group, and run functions by name.

A rank that is expected to die belongs in a set of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.processes import PROCESSES, of_sessions

CASE_S = 120


def _serve(rank: int, world: int, port: int, pipe: Connection, folder: str, group: str, environment: dict[str, str]) -> None:
    import gc
    import os

    import torch
    import torch.distributed as dist

    os.setsid()  # what it starts has its session, even when it has ended
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["RANKS_FOLDER"] = folder
    os.environ.update(environment)
    torch.set_num_threads(1)
    in_threads: list[tuple[str, str, str]] = []  # what nobody catches is printed, and a test would not see it
    threading.excepthook = lambda raised: in_threads.append(_told(raised.exc_value))
    gc.freeze()  # what was imported stays; tests that collect what a wrapper left would look through all of torch
    if torch.cuda.is_available():  # ranks share a device where there are too few
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=timedelta(seconds=30))
    dist.init_process_group(group, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    while True:
        task = pipe.recv()
        if task is None:
            break
        module, name, kwargs = task
        try:
            result = getattr(importlib.import_module(module), name)(rank=rank, world=world, **kwargs)
            pipe.send((False, in_threads.pop()) if in_threads else (True, result))
        except BaseException as error:
            pipe.send((False, _told(error)))
    dist.destroy_process_group()


def _told(error: BaseException | None) -> tuple[str, str, str]:
    return type(error).__name__, str(error), "".join(traceback.format_exception(error))


class RankError(AssertionError):
    """What a rank raised, with its traceback."""

    def __init__(self, rank: int, kind: str, text: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {text}\n{trace}")
        self.kind, self.text = kind, text


class Ranks:
    """`world` processes. `run("module:function", ...)` calls it on all and returns their results by rank.

    They share a folder, RANKS_FOLDER in their environment, that is there until `close()`.

    Args:
        world: how many.
        group: the backend of their process group.
        processes: where they are started.
        environments: of each rank, beside what it inherits; None for nothing more.
    """

    def __init__(
        self, world: int, group: str = "gloo", processes: Any = PROCESSES, environments: Sequence[dict[str, str]] | None = None
    ) -> None:
        self.world, self._group, self._processes = world, group, processes
        self._environments = environments or [{}] * world
        self._folder = tempfile.TemporaryDirectory()
        self._start()

    def _start(self) -> None:
        port = free_port()
        self.store = f"127.0.0.1:{port}"
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(self.world):
            ours, theirs = self._processes.Pipe()
            arguments = (rank, self.world, port, theirs, self._folder.name, self._group, self._environments[rank])
            process = self._processes.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, where: str, **kwargs: Any) -> list[Any]:
        """Results by rank; raises the first rank's error."""
        outcomes = self.try_run(where, **kwargs)
        for rank, (ok, value) in enumerate(outcomes):
            if not ok:
                raise RankError(rank, *value)
        return [value for _, value in outcomes]

    def try_run(self, where: str, **kwargs: Any) -> list[tuple[bool, Any]]:
        """(ok, result or (error name, text, traceback)) by rank; a rank that died gives its exit code as an error."""
        module, name = where.split(":")
        for pipe in self._pipes:
            pipe.send((module, name, kwargs))
        return [self._receive(rank) for rank in range(self.world)]

    def answers(
        self, where: str, limit_s: float, hurry_s: Callable[[tuple[bool, Any]], float | None], **kwargs: Any
    ) -> list[tuple[bool, Any] | None]:
        """As `try_run`, with None for a rank that did not answer in time: `limit_s`, or `hurry_s(answer)` after an answer for
        which that is not None.
        """
        module, name = where.split(":")
        for pipe in self._pipes:
            pipe.send((module, name, kwargs))
        deadline = time.monotonic() + limit_s
        found: list[tuple[bool, Any] | None] = [None] * self.world
        open_ones = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while open_ones:
            for pipe in wait(list(open_ones), max(0.0, deadline - time.monotonic())) or [None]:
                if pipe is None:
                    return found
                rank = open_ones.pop(pipe)
                answer = found[rank] = self._receive(rank)
                soon = hurry_s(answer)
                if soon is not None:
                    deadline = min(deadline, time.monotonic() + soon)
        return found

    def kill(self) -> None:
        """End the processes as they are, where something may be stuck in them. In place of `close()`."""
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            if not self._pipes[rank].poll(CASE_S):
                return False, ("TimeoutError", f"no answer within {CASE_S} s", "")
            outcome: tuple[bool, Any] = self._pipes[rank].recv()
            return outcome
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(10)
            return False, ("ProcessEnded", f"exit code {self.processes[rank].exitcode}", "")

    def left_over(self) -> list[str]:
        """What these processes have left: others that they started, and memory that has a name. What has none ends with its
        processes.
        """
        processes = of_sessions({process.pid for process in self.processes})
        return [f"process {number}" for number in processes] + list(map(str, Path("/dev/shm").glob("*gradlane*")))

    def renew(self) -> None:
        """Other processes from now on: what went wrong in these may have left a collective half done."""
        for process in self.processes:
            process.kill()
        self._end()
        self._start()

    def close(self) -> None:
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
