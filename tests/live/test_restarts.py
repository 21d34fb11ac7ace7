"""Restarts under plain torchrun, which keeps one store, and in it what ranks of earlier attempts have written."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.restarts import run_job, same_bits
from gradlane.core.backends import BackendName


@pytest.mark.parametrize("backend", ["all-reduce", "server"])
def test_a_restarted_job_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path, backend: BackendName) -> None:
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for folder, deaths in ((calm, dict[int, tuple[int, int]]()), (killed, {0: (1, 3)})):
        folder.mkdir()
        assert run_job(folder, backend, deaths, late_s=1.0) == ""
    assert same_bits(calm, killed)
