"""Plugins for other frameworks, with the real libraries on two ranks: the bits of a plain all-reduce, and messages that travel
while gradients are still computed.

They run where the libraries are installed, as `make test-plugins` does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT
from tests.plugins.steps import LAYERS
from tests.ports import free_port


def installed(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; make test-plugins installs it")


def on_two_ranks(words: list[str], **environment: str) -> list[str]:
    """What each rank printed. Between its words, {rank} is a rank's number."""
    common = {
        **os.environ, **environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2",
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, *[word.format(rank=rank) for word in words]],
            env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0, 0], "\n".join(error for _, error in said)
    return [out for out, _ in said]


def left_by(folder: Path, *module: str, **environment: str) -> list[dict[str, Any]]:
    """What the module left on each rank."""
    on_two_ranks(["-m", *module, f"{folder}/rank{{rank}}.json", str(free_port())], **environment)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
def test_a_compiled_step_gives_the_bits_of_a_plain_all_reduce_while_messages_overlap_with_it(
    tmp_path: Path, framework: str
) -> None:
    installed(framework)
    found = left_by(tmp_path, "tests.plugins.steps", framework)
    assert found[0]["plain"] == found[1]["plain"]
    for rank in found:
        assert rank["weights"]["mercury"] == rank["weights"]["bytescheduler"] == rank["plain"]
        assert rank["weights"]["not compiled"] == rank["plain, not compiled"]
        assert all(early > 0 for early in rank["early"].values()), "no message left before the last gradient was computed"
        # The last layer's gradient is ready first. A tree has layer10 before layer2. TensorFlow's threads may swap some.
        order = [int(re.search(r"layer(\d+)", name)[1]) for name in rank["order"]["mercury"]]
        assert sum(first > second for first, second in combinations(order, 2)) > 0.75 * LAYERS * (LAYERS - 1) / 2, order
    assert found[1]["failure"] == "ValueError: out of data"
    assert found[0]["failure"].startswith("PeerFailed: ")
    assert "ValueError: out of data" in found[0]["failure"]


REFUSED = {
    "torch": r"InputError: optimizer: got Keras's SGD, .* gradlane\.integrations\.keras\.AverageGradients\(\) instead of",
    "tensorflow": r"UnsupportedError: XLA compiles the step, .* expected model\.compile\(\.\.\., jit_compile=False\)",
    "jax": r"InputError: callbacks: this optimizer's gradients are averaged already, expected one AverageGradients;",
}


@pytest.mark.parametrize("backend", REFUSED)
def test_keras_fit_gives_the_bits_of_a_plain_all_reduce_while_messages_overlap_with_it(tmp_path: Path, backend: str) -> None:
    installed("keras", backend)
    found = left_by(tmp_path, "tests.plugins.keras_training", KERAS_BACKEND=backend)
    assert found[0]["weights"] == found[1]["weights"]
    for rank in found:
        assert rank["trained"] == rank["plain"]
        assert rank["momenta"] == rank["plain momenta"]
        assert rank["sent before the last was ready"] > 0
        assert rank["restored"]
        assert len(rank["refused"]) == 1
        assert re.match(REFUSED[backend], rank["refused"][0])


def test_the_jax_example_learns() -> None:
    installed("jax")
    first, second = on_two_ranks([str(ROOT / "examples" / "jax_averaging.py")])
    losses = [float(line.rpartition(" ")[2]) for line in first.splitlines()]
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 4
    assert not second


@pytest.mark.parametrize("backend", REFUSED)
def test_the_keras_example_learns_the_same_on_both_ranks(backend: str) -> None:
    installed("keras", backend)
    found = on_two_ranks([str(ROOT / "examples" / "keras_training.py")], KERAS_BACKEND=backend)
    accuracies = [float(re.search(r"accuracy ([\d.]+)", said)[1]) for said in found]
    assert accuracies[0] == accuracies[1] > 0.9
