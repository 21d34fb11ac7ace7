"""The plugin's summation over real nodes, and the NumPy training loop that is built on it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gradlane import policies
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.errors import InputError, PeerFailed, PlanError
from gradlane.plugin import Core, NodeSums
from gradlane.testing.generators import profile_of
from gradlane.transport import Node, NodeOptions

pytestmark = pytest.mark.matrix

EXAMPLE = Path(__file__).parents[2] / "examples" / "numpy_training.py"
JAX_EXAMPLE = EXAMPLE.with_name("jax_training.py")
SIZES = (100_000, 40, 3_000, 20_004)  # bytes


def plan_of(name: str, **knobs: int) -> Plan:
    profile = profile_of(*enumerate(SIZES), forward_ns=1, backward_ns=len(SIZES))
    return policies.get(name, **knobs).plan(profile, Network.line(2, 20_000, 10**9))


def arrays() -> list[np.ndarray]:
    return [np.zeros(size // 4, np.float32) for size in SIZES]


@contextmanager
def two_nodes() -> Iterator[list[Node]]:
    """Both workers, each with its server, in this process."""
    nodes = [Node(NodeOptions(world=2, servers=2, rank=rank, server=rank, linger_s=0.1)) for rank in range(2)]
    nodes[0].dial(1, "127.0.0.1", nodes[1].port)
    nodes[1].dial(0, "127.0.0.1", nodes[0].port)
    try:
        for node in nodes:
            node.join(30)
        yield nodes
    finally:
        for node in nodes:
            node.close()


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("bytescheduler", {"partition_bytes": 4096, "credit_bytes": 8192}),
        ("mg-wfbp", {}),  # merges: sums in copies
        ("sync-easgd", {}),
        ("mercury", {}),
        ("blocks", {}),
        ("dear", {"fusion_bytes": 50_000}),
    ],
)
def test_arrays_hold_the_sums_of_both_workers_whatever_the_plan_and_the_order_of_readiness(name, knobs):
    plan = plan_of(name, **knobs)
    with two_nodes() as nodes:
        mine = [arrays(), arrays()]
        summations = [NodeSums(node, own) for node, own in zip(nodes, mine, strict=True)]
        cores = [Core(plan, summation) for summation in summations]
        draw = np.random.default_rng(0)
        for _ in range(5):
            parts = [[draw.standard_normal(len(array)).astype(np.float32) for array in own] for own in mine]
            for rank, core in enumerate(cores):
                core.begin()
                for tensor in draw.permutation(len(SIZES)):
                    mine[rank][tensor][:] = parts[rank][tensor]
                    core.notify_ready(int(tensor))
            for rank, core in enumerate(cores):
                core.wait_for_all(timeout_s=30)
                for tensor in range(len(SIZES)):
                    assert np.array_equal(mine[rank][tensor], parts[0][tensor] + parts[1][tensor])
        for summation in summations:
            summation.close()


def test_a_worker_that_gives_up_ends_the_waits_of_the_other_with_its_reason():
    plan = plan_of("p3", slice_bytes=4096)
    with two_nodes() as nodes:
        summation = NodeSums(nodes[0], arrays())
        core = Core(plan, summation)
        core.begin()
        core.notify_ready(0)
        nodes[1].abort("out of data")
        with pytest.raises(PeerFailed, match="out of data"):
            core.wait(0, timeout_s=30)
        with pytest.raises(PeerFailed, match="out of data"):
            core.begin()
        summation.close()


def test_what_does_not_fit_is_refused():
    with two_nodes() as nodes:
        plan = plan_of("wfbp")
        with pytest.raises(PlanError, match="it is of tensors of"):
            Core(plan, NodeSums(nodes[0], arrays()[1:]))
        with pytest.raises(PlanError, match=r"got 2 lanes, expected at most the node's 1"):
            Core(plan_of("geryon", slice_bytes=4096), NodeSums(nodes[0], arrays()))
        with pytest.raises(InputError, match=r"arrays\[0\]: got one that is not C-contiguous"):
            NodeSums(nodes[0], [np.zeros((4, 4), np.float32).T[:2]])


def test_a_numpy_training_loop_gives_the_bits_of_one_process():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == EXAMPLE.with_suffix(".out").read_text()


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed; this plugin is experimental")
def test_a_jax_training_loop_gives_the_weights_of_one_process() -> None:
    done = subprocess.run([sys.executable, str(JAX_EXAMPLE)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    found = re.fullmatch(r"weights equal on both ranks, and within (\S+) of those of one process", last)
    assert found, last
    assert float(found[1]) < 1e-5
