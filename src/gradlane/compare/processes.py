"""Runs a module of gradlane on several ranks: on a lab's hosts, or on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradlane import lab
from gradlane.errors import LabError

TIMED_OUT = 124


def torchrun_here(processes: int) -> list[str]:
    """torchrun for `processes` on this host, over loopback, on a free port."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    # not SIGINT, which `run_quietly` answers for all
    options = ["--nproc-per-node", str(processes), "--signals-to-handle", "SIGTERM,SIGHUP,SIGQUIT"]
    return [sys.executable, "-m", "gradlane.live.startup.torchrun", *options, *rendezvous]


@contextmanager
def quietly(commands: Sequence[Sequence[str]], **options: Any) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run commands that ignore Ctrl-C, and end them with the block by SIGTERM, which needs no traceback.

    Args:
        commands, options: as for `subprocess.Popen`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def ignore_interrupt() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    running: list[subprocess.Popen[bytes]] = []
    try:
        running += [subprocess.Popen(command, preexec_fn=ignore_interrupt, **options) for command in commands]
        # from here on Ctrl-C finds all of them in the list
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield running
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


@contextmanager
def kept_running(commands: Sequence[Sequence[str]], restarts: int) -> Iterator[None]:
    """Run commands apart from Ctrl-C until the block ends, and start those again that a signal has ended.

    Args:
        commands: as for `subprocess.Popen`.
        restarts: how often each may be started again.
    """
    is_over, lock = False, threading.Lock()
    # in a session of its own a process hears no Ctrl-C
    running = [subprocess.Popen(command, start_new_session=True) for command in commands]

    def keep(place: int) -> None:
        for _ in range(restarts):
            if running[place].wait() >= 0:
                return
            with lock:
                if is_over:
                    return
                running[place] = subprocess.Popen(commands[place], start_new_session=True)

    keepers = [threading.Thread(target=keep, args=(place,), daemon=True) for place in range(len(commands))]
    try:
        for keeper in keepers:
            keeper.start()
        yield
    finally:
        with lock:
            is_over = True
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def run_quietly(
    command: Sequence[str], environment: Mapping[str, str], stdout: int | None = None, timeout_s: float | None = None
) -> int:
    """Run a command, and end it at Ctrl-C.

    Args:
        command, environment: what to run.
        stdout: its standard output; None: this process's.
        timeout_s: seconds after which it is ended; None for never.

    Returns:
        The exit code; `TIMED_OUT` if it was ended.
    """
    with quietly([command], env=environment, stdout=stdout) as (process,):
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return TIMED_OUT


def python_module(module: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def run_on_loopback(arguments: Sequence[str], ranks: int, environment: Mapping[str, str] | None = None) -> int:
    """Run `python ARGUMENTS` as `ranks` ranks on loopback; returns the exit code."""
    return run_quietly([*torchrun_here(ranks), *arguments], {**os.environ, **(environment or {})})


def run_on_lab(spec: lab.LabSpec, command: Sequence[str], samples: Path | None = None) -> int:
    """Run `command` on the hosts of `spec`; returns the exit code.

    Args:
        spec, command: what to run where.
        samples: file for samples of the links; None: none.

    Raises:
        LabError: this machine cannot run a lab.
        KeyboardInterrupt: Ctrl-C; all ranks have ended.
    """
    reason = lab.supported()
    if reason is not None:
        raise LabError(f"no lab can be made here: {reason}; --loopback runs the same without emulated links")
    exit_code = lab.run(spec, list(command), samples=samples, hears_interrupt=False)
    if exit_code == lab.INTERRUPTED:
        raise KeyboardInterrupt
    return exit_code


def run_on_ranks(
    module: str,
    arguments: Sequence[str],
    hosts: int,
    link_bits_per_second: int | None,
    loopback: bool,
    samples: Path | None = None,
    ranks_per_host: int = 1,
) -> int:
    """Run `python -m module arguments` on `hosts` hosts; returns the exit code.

    Args:
        module, arguments, hosts, ranks_per_host: what to run, and where.
        link_bits_per_second: rate of the lab's links; None: not shaped.
        loopback: run on loopback, without a lab.
        samples: file for samples of the links.

    Raises:
        LabError: this machine cannot run a lab.
    """
    command = python_module(module, arguments)
    if loopback:
        return run_on_loopback(command[1:], hosts * ranks_per_host)
    spec = lab.LabSpec(hosts, link_bits_per_second, ranks_per_host=ranks_per_host)
    return run_on_lab(spec, command, samples)
