"""Gradients that travel as halves: DDP's numbers under torch's own hooks, and sums within the error of one rounding."""

from __future__ import annotations

import pytest
import torch

from gradlane.core.launch_options import LaunchOptions
from gradlane.errors import InputError
from gradlane.live.session.bits import is_sum_of_halves
from gradlane.live.startup.options import AttachOptions
from tests.live.test_equality import GIVEN, KNOBS, SLICES

pytestmark = pytest.mark.matrix

POLICIES = [SLICES, ("ddp", KNOBS["ddp"]), ("dear", KNOBS["dear"])]
HALVES = ["bfloat16", "float16"]
CASE = "tests.live.halves:equals_the_hook"


LATE = {"network": GIVEN, "late": True, "model": "tied-transformer", "optimizer": "adam"}


@pytest.mark.parametrize(
    ("wire_dtype", "backend", "policies", "options"),
    [
        *((half, "all-reduce", POLICIES, {"network": GIVEN}) for half in HALVES),
        *((half, "server", [*POLICIES, "mercury"], {"network": GIVEN}) for half in HALVES),
        *((half, backend, POLICIES[:1], LATE) for half in HALVES for backend in ("all-reduce", "server")),
        ("bfloat16", "all-reduce", POLICIES[:1], {"network": GIVEN, "streams": True}),
        ("float16", "server", POLICIES[:1], {"network": GIVEN, "streams": True}),
        ("bfloat16", None, ["auto"], {}),
    ],
)
def test_two_ranks_train_as_under_ddp_with_a_hook_that_compresses(two_ranks, wire_dtype, backend, policies, options):
    """With torch's own for bfloat16. float16 with GradScaler, an overflow and clipping."""
    for found, scales, deferred in two_ranks.run(CASE, wire_dtype=wire_dtype, policies=policies, backend=backend, **options):
        assert found == {str(policy): [] for policy in policies}
        assert len(set(scales)) == (2 if wire_dtype == "float16" else 1)
        if "late" in options and wire_dtype == "bfloat16":  # clipping reads all gradients before each step
            assert deferred > 30


@pytest.mark.parametrize("wire_dtype", HALVES)
def test_servers_round_a_sum_once_and_only_float32_is_narrowed(four_ranks, wire_dtype):
    for found in four_ranks.run("tests.live.halves:sums", backend="server", wire_dtype=wire_dtype):
        assert found.pop("dtypes") == {"wide": wire_dtype, "widest": "float64", "narrow": "bfloat16", "small": wire_dtype}
        assert found.pop("profile") == [wire_dtype, "float64", "bfloat16", wire_dtype]
        assert found.pop("widest") < 1e-6
        found.pop("narrow")  # of the script's own dtype
        assert all(0.1 < error <= 1 for error in found.values()), found


@pytest.mark.parametrize("backend", ["all-reduce", "server"])
@pytest.mark.parametrize("wire_dtype", HALVES)
def test_verification_knows_what_halves_round(two_ranks, four_ranks, backend, wire_dtype):
    options = {"backend": backend, "wire_dtype": wire_dtype}
    right = {"model": "convolutions", "optimizer": "sgd", "first": 8, "every": 0}
    for verified, *_ in two_ranks.run("tests.live.verified:is_right", **right, **options):
        assert verified >= 8 * 10
    four_ranks.run("tests.live.halves:sums", verify=True, **options)


@pytest.mark.parametrize(("of_each", "kind", "text"), [
    (["bf16", None], "MismatchError", "ranks disagree on options"),
    (["bf16", torch.float16], "MismatchError", "ranks disagree on options"),
    (["int8"] * 2, "InputError", "wire_dtype: got 'int8', expected torch.bfloat16 or torch.float16, or their names"),
    ([torch.float64] * 2, "InputError", "wire_dtype: got torch.float64"),
])  # fmt: skip
def test_another_wire_dtype_or_one_of_another_rank_is_refused_at_attach(two_ranks, of_each, kind, text):
    for found, said in two_ranks.run("tests.live.halves:refused", of_each=of_each):
        assert (found, text in said) == (kind, True), said


def test_a_wire_dtype_has_several_names_and_the_launchers_wins():
    for given in ("bf16", "bfloat16", torch.bfloat16):
        assert AttachOptions.of("ddp", {"wire_dtype": given}, LaunchOptions()).carrier.wire_dtype == "bfloat16"
        launched = AttachOptions.of("ddp", {"wire_dtype": given}, LaunchOptions(wire_dtype="fp16"))
        assert launched.terms()["wire_dtype"] == "float16"
    assert AttachOptions.of("ddp", {}, LaunchOptions()).carrier.wire_dtype is None
    with pytest.raises(InputError, match="got 'half'"):
        AttachOptions.of("ddp", {}, LaunchOptions(wire_dtype="half"))


def test_to_divide_before_rounding_gives_the_bits_of_torchs_fp16_hook_where_nothing_is_subnormal_or_overflows():
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(30_000, generator=generator) * 2.0 ** torch.arange(-15, 15).repeat(1000)
    normal = (gradients.abs() >= 2.0**-13) & (gradients.abs() < 65504)
    ours, torchs = (gradients / 2).half(), gradients.half().div_(2)
    assert torch.equal(ours[normal], torchs[normal])
    assert not torch.equal(ours, torchs)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_wrong_sum_of_halves_is_told_from_one_that_was_rounded_on_its_way(half):
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(1000, generator=generator).to(half) for _ in range(5)]
    exact, magnitude = sum(part.float() for part in parts), sum(part.float().abs() for part in parts)
    one_by_one = sum(parts[1:], parts[0]).float()
    once = exact.to(half).float()
    assert is_sum_of_halves(exact, one_by_one, half, magnitude, 5)
    assert is_sum_of_halves(exact, once, half, magnitude, 5)
    assert is_sum_of_halves(exact, once, half, None, 2)
    wrong = once.clone()
    wrong[3] += 0.5 if half is torch.bfloat16 else 0.1
    for magnitudes, world in ((magnitude, 5), (None, 2)):
        assert not is_sum_of_halves(exact, wrong, half, magnitudes, world)
        for far in (torch.inf, torch.nan):
            wrong[3] = far
            assert not is_sum_of_halves(exact, wrong, half, magnitudes, world)


def test_a_sum_that_overflows_float16_is_right_and_one_that_should_have_is_not():
    def verdict(parts, total, world):
        exact, magnitude = torch.tensor([sum(parts)]), torch.tensor([sum(map(abs, parts))])
        return is_sum_of_halves(exact, torch.tensor([total]), torch.float16, magnitude if world > 2 else None, world)

    inf, nan = torch.inf, torch.nan
    for parts in ([60000.0, 60000.0], [inf, 1.0], [60000.0, 60000.0, 1.0]):
        assert verdict(parts, inf, len(parts))
        assert not verdict(parts, 1.0, len(parts))
    assert verdict([inf, -inf, 0.0], nan, 3)
    assert verdict([inf, -inf], nan, 2)
    assert verdict([60000.0, 60000.0, -60000.0], inf, 3)  # a partial sum has overflown
    assert verdict([60000.0, 60000.0, -60000.0], 60000.0, 3)
