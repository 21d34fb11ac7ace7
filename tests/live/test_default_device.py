"""Scripts that call `torch.set_default_device` for another device than the model's.

What gradlane makes for itself does not lie there: the device is "meta", whose tensors have no memory.
"""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("policy", "backend"),
    [
        ("ddp", "all-reduce"),
        ("bytescheduler", "all-reduce"),
        ("owners", "all-reduce"),
        ("dear", "all-reduce"),
        ("bytescheduler", "server"),
        ("mercury", "server"),
    ],
)
def test_a_session_has_the_bits_of_ddp(two_ranks, policy, backend):
    for differs in two_ranks.run(
        "tests.live.default_device:beside_ddp", default="meta", policy=policy, backend=backend, measures=False
    ):
        assert differs == []


@pytest.mark.parametrize("options", [{}, {"order": "coordinator"}, {"wire_dtype": "bf16"}], ids=lambda options: str(options))
def test_a_session_measures_the_network(two_ranks, options):
    for differs in two_ranks.run(
        "tests.live.default_device:beside_ddp", default="meta", policy="auto", backend=None, measures=True, **options
    ):
        assert differs == [] or "wire_dtype" in options
