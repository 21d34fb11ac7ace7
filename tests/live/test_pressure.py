"""How long threads wait for a processor, with other work that really takes it."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time

import pytest

from gradlane.live.adapt.contention import Pressure


@pytest.fixture
def one_processor():
    """This thread on one processor, which is returned."""
    allowed = os.sched_getaffinity(0)
    chosen = min(allowed)
    os.sched_setaffinity(0, {chosen})
    yield chosen
    os.sched_setaffinity(0, allowed)


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def part_while_computing(pressure: Pressure, seconds: float) -> float:
    began = time.monotonic_ns()
    pressure.part_of(1)
    compute(seconds)
    part = pressure.part_of(time.monotonic_ns() - began)
    assert part is not None
    return part


@pytest.mark.timing
def test_sharing_a_processor_with_another_process_is_waiting_for_it(one_processor):
    pressure = Pressure()
    program = f"import os; os.sched_setaffinity(0, {{{one_processor}}}); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()  # it runs
        try:
            shared = part_while_computing(pressure, 0.5)
        finally:
            other.kill()
    assert shared > 0.25  # of two that compute each has half


def open_files() -> set[str]:
    """The kernel's counts of threads that this process has open."""
    files = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            files.add(os.readlink(f"/proc/self/fd/{number}"))
    return {file for file in files if file.endswith("/schedstat")}


def test_files_are_closed_when_nobody_asks_any_more():
    assert open_files() == set()
    pressure = Pressure()
    assert len(open_files()) >= 1
    del pressure
    gc.collect()
    assert open_files() == set()
