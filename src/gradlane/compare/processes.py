"""Runs a module of gradlane on several ranks: on a lab's hosts, or on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradlane import lab
from gradlane.errors import LabError


def torchrun_here(processes: int) -> list[str]:
    """torchrun for `processes` on this host, over loopback, on a free port."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), *rendezvous]


def python_module(module: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def run_on_loopback(arguments: Sequence[str], ranks: int, environment: Mapping[str, str] | None = None) -> int:
    """Run `python ARGUMENTS` as `ranks` ranks on loopback; returns the exit code."""
    command = [*torchrun_here(ranks), *arguments]
    return subprocess.run(command, env={**os.environ, **(environment or {})}, check=False).returncode


def run_on_lab(spec: lab.LabSpec, command: Sequence[str], samples: Path | None = None) -> int:
    """Run `command` on the hosts of `spec`; returns the exit code.

    Args:
        spec, command: what to run where.
        samples: file for samples of the links; None: none.

    Raises:
        LabError: this machine cannot run a lab.
    """
    reason = lab.supported()
    if reason is not None:
        raise LabError(f"no lab can be made here: {reason}; --loopback runs the same without emulated links")
    return lab.run(spec, list(command), samples=samples)


def run_on_ranks(
    module: str,
    arguments: Sequence[str],
    hosts: int,
    link_bits_per_second: int | None,
    loopback: bool,
    samples: Path | None = None,
) -> int:
    """Run `python -m module arguments` as `hosts` ranks; returns the exit code.

    Args:
        module, arguments, hosts: what to run, and how many times.
        link_bits_per_second: rate of the lab's links; None: not shaped.
        loopback: run on loopback, without a lab.
        samples: file for samples of the links.

    Raises:
        LabError: this machine cannot run a lab.
    """
    command = python_module(module, arguments)
    if loopback:
        return run_on_loopback(command[1:], hosts)
    return run_on_lab(lab.LabSpec(hosts=hosts, link_bits_per_second=link_bits_per_second), command, samples)
