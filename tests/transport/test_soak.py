"""Many iterations leave nothing behind: memory, descriptors and packet buffers stay as they were."""

from __future__ import annotations

import pytest

from tests.transport.jobs import each_with_a_server, job

pytestmark = pytest.mark.extra

ITERATIONS = 2000
WARM = 300


def test_two_thousand_iterations_leave_memory_and_descriptors_as_they_were() -> None:
    with job(each_with_a_server(2), sizes=(40_000, 4, 10_000)) as running:
        running.all("iterate", WARM)
        before = [(member.call("resident_bytes"), member.call("descriptors")) for member in running.members]
        running.all("iterate", ITERATIONS)
        after = [(member.call("resident_bytes"), member.call("descriptors")) for member in running.members]
        held = [member.call("stats")["held_bytes"] for member in running.members]
    for (resident, descriptors), (resident_after, descriptors_after) in zip(before, after, strict=True):
        assert (resident_after - resident) / ITERATIONS < 100  # bytes an iteration
        assert descriptors_after == descriptors
    assert held == [0, 0]
