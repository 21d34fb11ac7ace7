"""Whether the ranks of a run fit this machine's memory, asked before the first one starts."""

from __future__ import annotations

from pathlib import Path

from gradlane.errors import InputError
from gradlane.units import format_bytes

RANK_BYTES = 200 * 10**6
"""Memory that a process has to itself once it has imported torch, at least (torch 2.13, CPU: 204 MB)."""
PYTHON_BYTES = 8 * 10**6
"""The same of a Python that has imported little."""
DEMONSTRATION_BYTES = 7_728_584
"""Parameters of the network of digits (`compare/demo.py`)."""
_COPIES = 3  # of the parameters: themselves, their gradients, and the optimizer's state


def comparing_bytes(model_bytes: int, arms: int) -> int:
    """Memory that a rank of a comparison needs at least: each arm has a model of its own.

    Args:
        model_bytes: parameters of one model.
        arms: policies that are compared; torch's DDP and computing alone come on top.
    """
    return RANK_BYTES + _COPIES * (arms + 2) * model_bytes


def need_memory(what: str, processes: int, each_bytes: int = RANK_BYTES, free_bytes: int | None = None) -> None:
    """Refuse a number of processes that this machine's memory cannot hold.

    Args:
        what: the command or option, for the message.
        processes: how many are to run at once, all of them together.
        each_bytes: memory that each needs at least.
        free_bytes: what there is; None: as `available_bytes` says.

    Raises:
        InputError: they do not fit.
    """
    free = available_bytes() if free_bytes is None else free_bytes
    if free is not None and processes * each_bytes > free:
        raise InputError(
            f"{what}: got {processes} processes, which need {format_bytes(each_bytes)} each or more, "
            f"{format_bytes(processes * each_bytes)} in all; expected at most {free // each_bytes}, since this machine has "
            f"{format_bytes(free)} available; take fewer, or a smaller model"
        )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that processes started here may take, by the kernel and by each control group of this process.

    Args:
        root: where /proc and /sys are.

    Returns:
        Bytes; None where nothing says.
    """
    limits = [_in_memory(root), *_in_groups(root)]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _in_memory(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line[0] == "MemAvailable:":
            return int(line[1]) * 1024
    return None


def _in_groups(root: Path) -> list[int]:
    """What is left in each control group, up to the root: of version 2, and of version 1's memory controller."""
    found = []
    for _, controllers, path in (line[0].split(":", 2) for line in _lines(root / "proc/self/cgroup")):
        if controllers not in ("", "memory"):
            continue
        top, most, used, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        if controllers:
            top, most, used, cache = top / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        group = top / path.lstrip("/")
        # in a container the path may be the host's, which is not there; then the top is this container's own group
        for folder in (group, *group.parents):
            limit, taken = (_number(folder / name) for name in (most, used))
            if limit is not None and taken is not None:
                freed = [int(line[1]) for line in _lines(folder / "memory.stat") if line[0] == cache]
                found.append(max(limit - taken + sum(freed), 0))
            if folder == top:
                break
    return found


def _number(path: Path) -> int | None:
    """The number that a file holds; None where it holds "max" or is not there."""
    lines = _lines(path)
    return int(lines[0][0]) if lines and lines[0][0].isdigit() else None


def _lines(path: Path) -> list[list[str]]:
    """The words of each line; none where the file is not there."""
    try:
        return [line.split() for line in path.read_text().splitlines() if line.strip()]
    except OSError:
        return []
