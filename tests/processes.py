"""Where tests start processes, and what a process has: all are forked from one server, which has imported what is slow and
started nothing. And how what a test has started ends.

Not from pytest's own process: a child would have its threads' locks, its sockets and its temporary files.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

AT_ONCE_S = 4.0
"""What a test takes as "at once": long for a machine that is not busy, and sooner than every limit whose passing would look the
same. How long things really take, `python -m bench.kills` and bench/notes/faults.md say.
"""

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.live.loops", "torch._dynamo", "gradlane.transport"])


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    """How many files, sockets and the like this process has open."""
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def no_descriptor_free() -> Iterator[None]:
    """Let this process open nothing more meanwhile, but for what takes the place of what it closes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 + max(map(int, os.listdir("/proc/self/fd")))  # a limit below one that is open would forbid its place, too
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


@contextlib.contextmanager
def ended() -> Iterator[None]:
    """End what `subprocess` starts inside of the block and still runs behind it, with all that descends from it."""
    started: list[subprocess.Popen[Any]] = []
    begin = subprocess.Popen.__init__

    def noted(process: subprocess.Popen[Any], *args: Any, **options: Any) -> None:
        begin(process, *args, **options)  # type: ignore[call-overload]
        started.append(process)

    subprocess.Popen.__init__ = noted  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        subprocess.Popen.__init__ = begin  # type: ignore[method-assign]
        for process in started:
            if process.poll() is None:
                for number in [process.pid, *_descendants(process.pid)]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)
                process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):  # a pipe that nobody reads any more takes no buffered rest
                        stream.close()


def of_sessions(leaders: set[int]) -> list[int]:
    """The processes in the sessions of `leaders`. Their parents may have ended."""
    return [number for number, (state, _, _, session, *_) in _fields() if int(session) in leaders and state != "Z"]


def _fields() -> Iterator[tuple[int, list[str]]]:
    """Of each process: its number, and its state, parent, process group, session and what else /proc tells behind its name."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # a name may have blanks and brackets
            yield int(folder.name), (folder / "stat").read_text().rpartition(")")[2].split()


def _descendants(parent: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for number, (_, parent_of_it, *_) in _fields():
        children.setdefault(int(parent_of_it), []).append(number)
    found = [parent]
    for number in found:
        found += children.get(number, [])
    return found[1:]
