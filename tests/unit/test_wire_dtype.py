"""Float32 gradients that travel as halves, in profiles, plans and commands."""

from __future__ import annotations

import json
import re

import pytest

from gradlane import policies, zoo
from gradlane.core import files
from gradlane.core.checks import check_plan
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.core.wire_dtype import wire_dtype_of
from gradlane.errors import InputError, PlanError
from tests.commands import invoke

MIXED = Profile(
    "mixed",
    "none",
    tuple(
        TensorProfile(TensorSpec(f"t{index}", size, dtype), 10 * index, 0)
        for index, (size, dtype) in enumerate([(4000, "float32"), (4000, "float64"), (4000, "bfloat16"), (4, "float32")])
    ),
    (Layer("all", 100),),
    100,
    "by hand",
    25,
)


def test_float32_travels_in_half_of_the_bytes_and_all_else_as_it_is() -> None:
    narrowed = MIXED.with_wire_dtype("float16")
    assert [(spec.size_bytes, spec.dtype) for spec in narrowed.specs] == [
        (2000, "float16"),
        (4000, "float64"),
        (4000, "bfloat16"),
        (2, "float16"),
    ]
    assert narrowed.source == "float16 on the wire; by hand"
    assert (narrowed.layers, narrowed.backward_ns, narrowed.uncovered_ns) == (MIXED.layers, MIXED.backward_ns, 25)
    assert (MIXED.scaled(2).uncovered_ns, MIXED.stretched(2).uncovered_ns) == (25, 50)
    assert MIXED.in_order_of(MIXED.specs[::-1]).uncovered_ns == 25
    assert [tensor.ready_ns for tensor in narrowed.tensors] == [0, 10, 20, 30]
    assert narrowed.with_wire_dtype("bfloat16") is narrowed
    assert MIXED.with_wire_dtype(None) is MIXED


@pytest.mark.parametrize("name", policies.names())
def test_every_policy_plans_for_what_travels(name: str) -> None:
    profile = zoo.profile("resnet50").with_wire_dtype("bfloat16")
    plan = policies.get(name).plan(profile, Network.line(4, 50_000, 10**9))
    check_plan(plan, profile.specs)
    assert plan.size_bytes * 2 == zoo.profile("resnet50").size_bytes


def test_buckets_of_ddp_are_counted_in_float32_whatever_travels() -> None:
    """Torch fills buckets with float32 gradients, and its hook halves each bucket."""
    whole, network = zoo.profile("resnet50"), Network.line(4, 50_000, 10**9)

    def buckets(profile: Profile) -> list[tuple[int, ...]]:
        return [message.tensors for message in policies.get("ddp").plan(profile, network).messages]

    assert buckets(whole.with_wire_dtype("bfloat16")) == buckets(whole)
    assert [MIXED.with_wire_dtype("float16").gradient_bytes(tensor) for tensor in range(4)] == [4000, 4000, 4000, 4]


def test_a_plan_for_another_wire_dtype_says_so() -> None:
    plan = policies.get("wfbp").plan(MIXED, Network.line(2, 50_000, 10**9))
    with pytest.raises(PlanError, match=r"t0 \(4000 B, float32\) .* t0 \(2000 B, float16\) .*; give attach the wire_dtype"):
        check_plan(plan, MIXED.with_wire_dtype("float16").specs)


def test_names_of_wire_dtypes() -> None:
    names = {"bf16": "bfloat16", "bfloat16": "bfloat16", "torch.bfloat16": "bfloat16", "fp16": "float16"}
    assert {name: wire_dtype_of(name) for name in names} == names
    for wrong in ("float32", "half", 16, ""):
        with pytest.raises(InputError, match=f"wire_dtype: got {wrong!r}, expected torch.bfloat16 or torch.float16"):
            wire_dtype_of(wrong)


# -- commands -----------------------------------------------------------------------------------------------


def test_plan_and_simulate_take_a_profile_as_it_travels(tmp_path) -> None:
    files.write(tmp_path / "profile.json", zoo.profile("vgg16").with_wire_dtype("bfloat16"))
    given = ["--rate", "1gbit", "--workers", "4", "--policy", "mg-wfbp"]
    invoke("plan", "vgg16", *given, "--wire-dtype", "bf16", "--out", tmp_path / "plan.json")
    plan = files.read(tmp_path / "plan.json", Plan)
    assert {spec.dtype for spec in plan.tensors} == {"bfloat16"}
    assert plan.size_bytes * 2 == zoo.profile("vgg16").size_bytes
    for command in ("simulate",), ("whatif", "workers"):
        rows = [
            json.loads(invoke(*command, *profile, *given, "--json"))["rows"]
            for profile in (["vgg16", "--wire-dtype", "bfloat16"], [tmp_path / "profile.json"], ["vgg16"])
        ]
        assert rows[0] == rows[1]
        assert rows[0][0]["iteration_ns"] < 0.7 * rows[2][0]["iteration_ns"]


def test_a_wire_dtype_that_is_none_is_refused_and_so_is_one_for_stock_ddp() -> None:
    assert "--wire-dtype: got 'int8', expected one of bf16, fp16" in invoke("plan", "vgg16", "--wire-dtype", "int8", code=2)
    text = re.sub(r"\s+", " ", invoke("plan", "vgg16", "--wire-dtype", "bf16", "--emit", "ddp-kwargs", code=2))
    assert "--emit: got it with --wire-dtype, expected one or the other; DDP's buckets are counted in float32" in text
