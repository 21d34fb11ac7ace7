"""Ranks that memory cannot hold are refused before the first one starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradlane.compare.memory import available_bytes, comparing_bytes, need_memory
from gradlane.errors import InputError
from tests.commands import EXAMPLE, invoke

GB = 10**9


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:       9000000 kB\nMemAvailable:    8000000 kB\n"}
CASES: dict[str, tuple[dict[str, str], int | None]] = {
    "nothing says": ({}, None),
    "the kernel": (MEMINFO, 8_000_000 * 1024),
    "a group above this process's, version 2": (
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/slice/job\n",
            "sys/fs/cgroup/slice/job/memory.max": "max\n",
            "sys/fs/cgroup/slice/job/memory.current": "100\n",
            "sys/fs/cgroup/slice/memory.max": f"{3 * GB}\n",
            "sys/fs/cgroup/slice/memory.current": f"{2 * GB}\n",
            "sys/fs/cgroup/slice/memory.stat": f"anon {GB}\ninactive_file {GB // 2}\n",
        },
        3 * GB // 2,
    ),
    "a container that sees its own group alone, version 1": (
        {
            **MEMINFO,
            "proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GB}\n",
        },
        GB,
    ),
    "a group that has more than it may": (
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{GB}\n",
            "sys/fs/cgroup/memory.current": f"{2 * GB}\n",
        },
        0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_available_is_the_least_that_any_limit_leaves(case: str, tmp_path: Path) -> None:
    files, expected = CASES[case]
    assert available_bytes(write(tmp_path, files)) == expected


def test_this_machine_has_memory() -> None:
    free = available_bytes()
    assert free is not None
    assert free > 0


def test_the_most_that_fits_is_named() -> None:
    need_memory("--hosts", 10, GB, 10 * GB)
    with pytest.raises(InputError, match=r"--hosts: got 11 processes, .* expected at most 10"):
        need_memory("--hosts", 11, GB, 10 * GB)


def test_each_arm_has_a_model_of_its_own() -> None:
    assert comparing_bytes(2 * GB, 5) - comparing_bytes(GB, 5) == 3 * 7 * GB


@pytest.mark.parametrize(
    "options",
    [
        ["compare", "vgg16", "--loopback", "--scale", 1000],
        ["compare", "--loopback", "--hosts", 200_000],
        ["probe", "--hosts", 200_000],
        ["profile", "--nproc", 1_000_000, EXAMPLE],
        ["advise", "--nproc", 1_000_000, EXAMPLE],
    ],
)
def test_a_command_starts_nothing_that_memory_cannot_hold(options: list[object]) -> None:
    said = " ".join(invoke(*options, code=2).split())
    assert "each or more" in said
    assert "available" in said
