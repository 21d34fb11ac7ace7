"""Restarts under plain torchrun, which keeps one store, and in it what ranks of earlier attempts have written."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.restarts import POLICIES, run_job, same_bits

pytestmark = pytest.mark.extra


def test_jobs_that_are_killed_at_different_steps_end_with_the_same_bits_on_both_backends(tmp_path: Path) -> None:
    # at two ranks both backends have DDP's bits; `python -m bench.restarts` compares with undisturbed jobs, too
    folders = []
    for backend, death in zip(POLICIES, [(1, 3), (0, 6)], strict=True):
        folders.append(tmp_path / backend)
        folders[-1].mkdir()
        assert run_job(folders[-1], backend, {0: death}, late_s=1.0) == ""
    assert same_bits(*folders)
