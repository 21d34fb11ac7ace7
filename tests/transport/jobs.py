"""Jobs for the tests of faults: each member is a process with a node, told what to do through a pipe.

`job(...)` starts the members, makes them meet (through proxies where asked), and kills whatever is left in the end.
Times are of the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from gradlane.errors import JobError
from gradlane.transport import Node, NodeOptions
from tests import processes
from tests.processes import PROCESSES

SIZES = (1 << 20, 40_000, 4, 300_000)
"""Bytes of the tensors of most jobs: many packets, two, one element, an odd end."""
LIMIT_S = 30.0


@dataclass(frozen=True)
class Outcome:
    """What a member's task came to: a value, or the error (its type's name, the rank it blames, its text)."""

    value: Any = None
    error: str = ""
    rank: int | None = None
    text: str = ""
    at: float = 0.0


class Member:
    """What runs in a member's process."""

    def __init__(self, options: NodeOptions, iterated: Any) -> None:
        self.node = Node(options)
        self.iterated = iterated
        self.tensors: list[np.ndarray] = []
        self.iteration = 0

    @property
    def rank(self) -> int:
        assert self.node.options.rank is not None
        return self.node.options.rank

    def dial(self, addresses: Sequence[tuple[int, str, int]]) -> None:
        for server, address, port in addresses:
            self.node.dial(server, address, port)

    def join(self, timeout_s: float = LIMIT_S) -> None:
        self.node.join(timeout_s)

    def define(self, sizes: Sequence[int] = SIZES) -> None:
        for size in sizes:
            tensor = np.zeros(size // 4, np.float32)
            self.node.define(len(self.tensors), tensor.ctypes.data, tensor.nbytes, "float32")
            self.tensors.append(tensor)

    def push(self) -> None:
        """Hand over every tensor with values that tell rank, tensor and iteration."""
        for index, tensor in enumerate(self.tensors):
            tensor[:] = self._part(index, self.rank)
        for index in range(len(self.tensors)):
            self.node.push(index)

    def take(self, timeout_s: float = LIMIT_S) -> None:
        """Wait for all sums. Whatever is reported done, before a failure too, is the whole sum: asserted."""
        left = len(self.tensors)
        while left:
            done = self.node.take(timeout_s)
            if not done:
                raise TimeoutError(f"{left} tensors are not done after {timeout_s} s")
            for index in done:
                expected = sum(self._part(index, rank) for rank in range(self.node.options.world))
                wrong = np.count_nonzero(self.tensors[index] != expected)
                assert wrong == 0, f"{wrong} elements of tensor {index} are not the sum in iteration {self.iteration}"
            left -= len(done)
        self.iteration += 1
        self.iterated.release()

    def _part(self, tensor: int, rank: int) -> np.float32:
        return np.float32((rank + 1) * 1000 + tensor * 10 + self.iteration % 7)

    def iterate(self, times: int) -> int:
        for _ in range(times):
            self.push()
            self.take()
        return self.iteration

    def iterate_for(self, seconds: float) -> int:
        """Iterate until rank 0's clock says that the time is up; all ranks do as many. To be called once."""
        until = time.monotonic() + seconds
        goes_on, flag = np.ones(1, np.float32), len(self.tensors)
        self.node.define(flag, goes_on.ctypes.data, goes_on.nbytes, "float32")
        while goes_on[0]:
            goes_on[0] = self.rank == 0 and time.monotonic() < until
            self.node.push(flag, notify=False)
            self.push()
            self.take()
            self.node.wait(flag, LIMIT_S)
        return self.iteration

    def iterate_until_failure(self) -> None:
        while True:
            self.iterate(1)

    def wait_for_failure(self, timeout_s: float = LIMIT_S) -> None:
        """Idle: raises what the node fails of."""
        self.node.take(timeout_s)

    def stats(self) -> dict[str, int]:
        return self.node.stats()

    def resident_bytes(self) -> int:
        return processes.resident_bytes()

    def descriptors(self) -> int:
        return processes.descriptors()

    def apply(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Anything else: a function of the member, which must be one that pickle finds."""
        return function(self, *arguments)


def _serve(pipe: Connection, options: NodeOptions, iterated: Any) -> None:
    member: Member | None = None
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if member is None:
                member = Member(options, iterated)
                value: Any = member.node.port
            elif name == "close":
                member.node.close()
                value = None
            else:
                value = getattr(member, name)(*arguments)
            outcome = Outcome(value, at=time.monotonic())
        except Exception as error:
            rank = getattr(error, "rank", None)
            outcome = Outcome(None, type(error).__name__, rank, str(error), time.monotonic())
        pipe.send(outcome)


@dataclass
class Process:
    """The parent's end of a member."""

    process: Any
    pipe: Connection
    options: NodeOptions
    iterated: Any  # a semaphore, which the member raises with each iteration
    port: int = 0

    @property
    def pid(self) -> int:
        return self.process.pid  # type: ignore[no-any-return]

    def begin(self, name: str, *arguments: Any) -> None:
        self.pipe.send((name, arguments))

    def outcome(self, timeout_s: float = LIMIT_S) -> Outcome:
        assert self.pipe.poll(timeout_s), f"nothing from {self.process.name} within {timeout_s} s"
        return self.pipe.recv()  # type: ignore[no-any-return]

    def call(self, name: str, *arguments: Any) -> Any:
        self.begin(name, *arguments)
        outcome = self.outcome()
        assert not outcome.error, f"{self.process.name}: {outcome.error}: {outcome.text}"
        return outcome.value

    def wait_for_iterations(self, times: int) -> None:
        """Return when it has done so many, from now on."""
        while self.iterated.acquire(block=False):
            pass
        for _ in range(times):
            assert self.iterated.acquire(timeout=LIMIT_S), f"{self.process.name} does not get on"

    def signal(self, number: int) -> float:
        """Send a signal; returns when."""
        at = time.monotonic()
        os.kill(self.pid, number)
        return at


class Job:
    """The members of a job; workers (with a server each, unless there are servers of their own) come first, by rank."""

    def __init__(self, options: Sequence[NodeOptions]) -> None:
        self.members: list[Process] = []
        for at, each in enumerate(options):
            ours, theirs = PROCESSES.Pipe()
            name = f"rank {each.rank}" if each.rank is not None else f"server {each.server}"
            iterated = PROCESSES.Semaphore(0)
            process = PROCESSES.Process(target=_serve, args=(theirs, each, iterated), name=name, daemon=True)
            process.start()
            theirs.close()
            self.members.append(Process(process, ours, each, iterated))
            self.members[at].begin("start")

    def __getitem__(self, index: int) -> Process:
        return self.members[index]

    def __len__(self) -> int:
        return len(self.members)

    @property
    def workers(self) -> list[Process]:
        return [member for member in self.members if member.options.rank is not None]

    def started(self) -> None:
        for member in self.members:
            outcome = member.outcome()
            assert not outcome.error, outcome.text
            member.port = outcome.value

    def dial(self, through: Callable[[int, int, str, int], tuple[str, int]] | None = None) -> None:
        """through(rank, server, address, port): where a worker is to find a server instead."""
        for worker in self.workers:
            addresses = []
            for member in self.members:
                server = member.options.server
                if server is None or member is worker:
                    continue
                at = member.options.address, member.port
                if through is not None:
                    at = through(worker.options.rank or 0, server, *at)
                addresses.append((server, *at))
            worker.call("dial", addresses)

    def all(self, name: str, *arguments: Any, among: Sequence[Process] | None = None) -> list[Outcome]:
        chosen = self.members if among is None else among
        for member in chosen:
            member.begin(name, *arguments)
        return [member.outcome() for member in chosen]

    def end(self) -> None:
        for member in self.members:
            member.process.kill()
            member.process.join()
            member.pipe.close()


def each_with_a_server(world: int, **options: Any) -> list[NodeOptions]:
    return [NodeOptions(**{"world": world, "servers": world, "rank": rank, "server": rank, **options}) for rank in range(world)]


def servers_apart(world: int, servers: int, **options: Any) -> list[NodeOptions]:
    """Workers, then servers in processes of their own."""
    shared = {"world": world, "servers": servers, "tell_tables": True, **options}
    workers = [NodeOptions(rank=rank, server=None, **shared) for rank in range(world)]
    return workers + [NodeOptions(rank=None, server=server, **shared) for server in range(servers)]


@contextmanager
def job(
    options: Sequence[NodeOptions],
    sizes: Sequence[int] | None = SIZES,
    through: Callable[[int, int, str, int], tuple[str, int]] | None = None,
) -> Iterator[Job]:
    """A job whose members have joined and defined tensors of `sizes` (None: they have only met)."""
    running = Job(options)
    try:
        running.started()
        running.dial(through)
        assert [outcome.text for outcome in running.all("join")] == [""] * len(running)
        if sizes is not None:
            assert [outcome.text for outcome in running.all("define", sizes, among=running.workers)] == [""] * len(
                running.workers
            )
        yield running
    finally:
        running.end()


def blamed(outcomes: Sequence[Outcome]) -> list[tuple[str, int | None]]:
    return [(outcome.error, outcome.rank) for outcome in outcomes]


def is_job_error(name: str) -> bool:
    return name in {error.__name__ for error in _subclasses(JobError)}


def _subclasses(of: type) -> Iterator[type]:
    yield of
    for each in of.__subclasses__():
        yield from _subclasses(each)
