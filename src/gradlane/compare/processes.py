"""Runs a module of gradlane on several ranks: on a lab's hosts, or on loopback."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gradlane import lab
from gradlane.compare.memory import RANK_BYTES, need_memory
from gradlane.errors import InputError, LabError, UnsupportedError
from gradlane.lifetime import Children

TIMED_OUT = 124


def need_torch(command: str) -> None:
    """Refuse a command whose ranks need torch where it is not installed; does not import it.

    Args:
        command: its name, for the error.

    Raises:
        UnsupportedError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError(f"{command} needs torch, which is not installed; install it with: pip install 'gradlane[torch]'")


def need_no_job(command: str) -> None:
    """Refuse a command that starts ranks of its own where it is itself started as a rank.

    Args:
        command: its name, for the error.

    Raises:
        InputError: torchrun, srun or `gradlane lab` has started this process as one of several ranks.
    """
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "1")
    if rank is not None and world != "1":
        raise InputError(
            f"RANK, WORLD_SIZE: got {rank} of {world}, which torchrun or gradlane lab has set for a rank of its job, expected "
            f"none: gradlane {command} starts ranks of its own"
        )


def torchrun_here(processes: int) -> list[str]:
    """torchrun for `processes` on this host, over loopback, on a free port."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    # not SIGINT: torchrun would send it on to the ranks, and `run_quietly` has SIGTERM sent
    options = ["--nproc-per-node", str(processes), "--signals-to-handle", "SIGTERM,SIGHUP,SIGQUIT"]
    return [sys.executable, "-m", "gradlane.live.startup.torchrun", *options, *rendezvous]


@contextmanager
def kept_running(commands: Sequence[Sequence[str]], restarts: int) -> Iterator[None]:
    """Run commands apart from Ctrl-C until the block ends, and start those again that a signal has ended.

    Args:
        commands: as for `subprocess.Popen`.
        restarts: how often each may be started again.
    """
    is_over, lock = False, threading.Lock()

    def keep(command: Sequence[str], process: subprocess.Popen[bytes]) -> None:
        for _ in range(restarts):
            if process.wait() >= 0:
                return
            with lock:
                if is_over:
                    return
                process = children.start(command)
        process.wait()  # it is killed when the thread that started it ends

    with Children() as children:
        started = [(command, children.start(command)) for command in commands]
        for each in started:
            threading.Thread(target=keep, args=each, daemon=True).start()
        try:
            yield
        finally:
            with lock:
                is_over = True


def run_quietly(
    command: Sequence[str], environment: Mapping[str, str], stdout: int | None = None, timeout_s: float | None = None
) -> int:
    """Run a command, and end it by SIGTERM at Ctrl-C, which needs no traceback.

    Args:
        command, environment: what to run.
        stdout: its standard output; None: this process's.
        timeout_s: seconds after which it is ended; None for never.

    Returns:
        The exit code; `TIMED_OUT` if it was ended.
    """
    with Children() as children:
        try:
            return children.start(command, env=environment, stdout=stdout).wait(timeout_s)
        except subprocess.TimeoutExpired:
            return TIMED_OUT


def python_module(module: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def run_on_loopback(
    arguments: Sequence[str], ranks: int, environment: Mapping[str, str] | None = None, rank_bytes: int = RANK_BYTES
) -> int:
    """Run `python ARGUMENTS` on loopback; returns the exit code.

    Args:
        arguments, environment: what to run.
        ranks: how many times.
        rank_bytes: memory that each needs at least.

    Raises:
        InputError: this machine has not the memory.
    """
    need_memory("ranks", ranks, rank_bytes)
    return run_quietly([*torchrun_here(ranks), *arguments], {**os.environ, **(environment or {})})


def need_lab(spec: lab.LabSpec, rank_bytes: int = RANK_BYTES) -> None:
    """Refuse a lab that this machine cannot hold.

    Args:
        spec: the lab.
        rank_bytes: memory that each rank and server needs at least.

    Raises:
        InputError: this machine has not the memory.
        LabError: this machine cannot run a lab.
    """
    need_memory("ranks", sum(len(job.workers) + len(job.servers) for job in spec.all_jobs), rank_bytes)
    reason = lab.supported()
    if reason is not None:
        raise LabError(f"no lab can be made here: {reason}; --loopback runs the same without emulated links")


def run_on_lab(spec: lab.LabSpec, command: Sequence[str], samples: Path | None = None, rank_bytes: int = RANK_BYTES) -> int:
    """Run `command` on the hosts of `spec`; returns the exit code.

    Args:
        spec, command: what to run where.
        samples: file for samples of the links; None: none.
        rank_bytes: memory that each rank and server needs at least.

    Raises:
        InputError: this machine has not the memory.
        LabError: this machine cannot run a lab.
        KeyboardInterrupt: Ctrl-C; all ranks have ended.
    """
    need_lab(spec, rank_bytes)
    return lab.run(spec, list(command), samples=samples, hears_interrupt=False)


@dataclass(frozen=True)
class RankHosts:
    """Hosts that ranks run on: those of a lab, or this one's loopback.

    Attributes:
        hosts, ranks_per_host: how many.
        link_bits_per_second: rate of the lab's links; None: not shaped.
        loopback: all ranks are on loopback, without a lab.
        rank_bytes: memory that each rank needs at least.
    """

    hosts: int
    link_bits_per_second: int | None
    loopback: bool
    ranks_per_host: int = 1
    rank_bytes: int = RANK_BYTES

    def check(self) -> None:
        """Refuse to run ranks that this machine cannot hold.

        Raises:
            InputError: there are more hosts than a lab has, or this machine has not the memory.
            LabError: this machine cannot run a lab.
        """
        if not self.loopback:
            need_lab(self._spec, self.rank_bytes)
        else:
            need_memory("ranks", self._ranks, self.rank_bytes)

    def run(self, module: str, arguments: Sequence[str], samples: Path | None = None) -> int:
        """Run `python -m module arguments` on each rank; returns the exit code.

        Args:
            module, arguments: what to run.
            samples: file for samples of the links.

        Raises:
            InputError, LabError: as `check`.
        """
        command = python_module(module, arguments)
        if self.loopback:
            return run_on_loopback(command[1:], self._ranks, rank_bytes=self.rank_bytes)
        return run_on_lab(self._spec, command, samples, self.rank_bytes)

    @property
    def _ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def _spec(self) -> lab.LabSpec:
        return lab.LabSpec(self.hosts, self.link_bits_per_second, ranks_per_host=self.ranks_per_host)
