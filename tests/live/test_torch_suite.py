"""A selection of torch's own tests of torch.distributed over gradlane; `make test-c10d` runs all, beside Gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extra

pytest.importorskip("expecttest", reason="torch's own tests need it")

# one of each kind of call, where more of a kind differ only in the operation or the group; those of Gloo's tests that
# want a GPU, NCCL or eight ranks skip themselves and are not here
SELECTION = [
    "test_all_gather_coalesced_complex",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo",
    "test_batch_isend_irecv_gloo_tags",
    "test_get_backend",
    "test_irecv",
    "test_isend_torch_profiler",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_monitored_barrier_gloo_subgroup",
    "test_reduce_sum_twice",
    "test_scatter_checks",
    "test_send_recv_any_source_torch_profiler",
    "test_send_recv_autograd_profiler",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
]


def test_what_torch_tests_over_gloo_passes_over_gradlane() -> None:
    only = f"^({'|'.join(SELECTION)})$"
    command = [sys.executable, "-m", "tests.torch_suite", "--backend", "gradlane", "--json", "--only", only]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, timeout=170, check=True
    ).stdout
    ends = {result["test"]: (result["end"], result["reason"]) for result in map(json.loads, done.splitlines())}
    assert ends == dict.fromkeys(SELECTION, ("pass", ""))
