"""Slurm: the variables that torchrun sets for a rank, from those that `srun` sets for a task."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gradlane.errors import InputError

_FIRST_PORT, _PORTS = 20_000, 20_000  # jobs on one host get ports of their own, unless their ids are 20,000 apart


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks of a Slurm step, and no launcher made it a rank."""
    is_task = "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment
    return is_task and "RANK" not in environment and _number(environment, "SLURM_NTASKS", "1") > 1


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of this task as a rank: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT.

    Args:
        environment: of a process for which `is_rank` holds. MASTER_ADDR and MASTER_PORT stay as they
            are, if they are there: else they are the step's first host and a port that follows from
            the ids of job and step.

    Raises:
        InputError: a variable of Slurm is missing or has a value that cannot be read.
    """
    job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    port = str(_FIRST_PORT + (job * 7 + step) % _PORTS)
    return {
        "RANK": str(_number(environment, "SLURM_PROCID")),
        "WORLD_SIZE": str(_number(environment, "SLURM_NTASKS")),
        "LOCAL_RANK": str(_number(environment, "SLURM_LOCALID")),
        "LOCAL_WORLD_SIZE": str(_tasks_on_this_host(environment)),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or _first_host(environment),
        "MASTER_PORT": environment.get("MASTER_PORT") or port,
    }


def _first_host(environment: Mapping[str, str]) -> str:
    """The first of a list such as "gpu[03-05,9],login1"."""
    name = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environment else "SLURM_JOB_NODELIST"
    text = environment.get(name, "")
    first = re.match(r"(?P<before>[^\[,\s]+)(?:\[(?P<number>[0-9]+)[^\]]*\](?P<after>[^\[,\s]*))?(?:,|$)", text)
    if first is None:
        raise InputError(f"{name}: got {text!r}, expected a list of hosts as Slurm writes it; set MASTER_ADDR to rank 0's host")
    return f"{first['before']}{first['number'] or ''}{first['after'] or ''}"


def _tasks_on_this_host(environment: Mapping[str, str]) -> int:
    """This host's number of a list such as "4(x2),3", which has the tasks of each host."""
    name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in environment else "SLURM_TASKS_PER_NODE"
    text, host = environment.get(name, ""), _number(environment, "SLURM_NODEID")
    hosts = 0
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if found is None:
            break
        hosts += int(found[2] or 1)
        if host < hosts:
            return int(found[1])
    raise InputError(f"{name}: got {text!r}, expected the tasks of {host + 1} or more hosts, as Slurm writes them")


def _number(environment: Mapping[str, str], name: str, default: str = "") -> int:
    text = environment.get(name, default)
    if not re.fullmatch("[0-9]{1,12}", text):
        raise InputError(f"{name}: got {text!r}, expected a number, as srun sets it")
    return int(text)
