"""`check_finite`: the rank and tensor that first were not finite, before an update with them."""

from __future__ import annotations

import math

import pytest
import torch

from gradlane.errors import InputError, NotFiniteError
from gradlane.live.comm.control_frames import Cause
from gradlane.live.session.finite import _is_finite
from gradlane.live.startup.options import SteppingOptions

pytestmark = pytest.mark.matrix

JOB = "tests.live.faults:not_finite"
both = pytest.mark.parametrize("backend", ["all-reduce", "server"])


@both
@pytest.mark.parametrize("how", ["crossing", "barrier"])
@pytest.mark.parametrize(("culprit", "value"), [(0, math.nan), (3, math.inf)])
def test_all_ranks_name_the_rank_and_tensor_and_update_nothing_with_it(four_ranks, backend, how, culprit, value):
    outcomes = four_ranks.run(JOB, backend=backend, culprit=culprit, how=how, value=value)
    assert len({text for _, text, *_ in outcomes}) == 1
    for kind, text, rank, done, finite, _ in outcomes:
        assert (kind, rank, finite) == ("NotFiniteError", culprit, True)
        assert done == 4 if how == "barrier" else done in (4, 5)
        assert text.startswith(f"iteration 4: the gradient of layers.3.weight on rank {culprit} is infinite or NaN")


@both
@pytest.mark.parametrize("how", ["scaler", "fused"])
def test_a_step_that_a_grad_scaler_leaves_out_raises_nothing(two_ranks, backend, how):
    outcomes = two_ranks.run(JOB, backend=backend, culprit=1, how=how, value=math.inf)
    assert outcomes == [("", "", None, 8, True, 2.0)] * 2  # the scale was halved once


@both
def test_a_value_that_its_half_cannot_hold_is_not_finite_on_the_wire(two_ranks, backend):
    for *outcome, finite, _ in two_ranks.run(
        JOB, backend=backend, culprit=1, how="barrier", value=1e6, wire_dtype="float16", packet_bytes=None
    ):
        assert outcome[0] == "NotFiniteError"
        assert outcome[2:] == [1, 4]
        assert finite


def test_a_parameter_that_is_not_finite_at_attach_ends_the_job_on_all_ranks(two_ranks):
    outcomes = two_ranks.run("tests.live.faults:not_finite_at_attach")
    assert "NotFiniteError" in {kind for kind, _ in outcomes}
    for kind, text in outcomes:
        assert kind in ("NotFiniteError", "PeerFailed")
        assert "layers.1.bias is infinite or NaN on rank" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_finite_values_are_finite_however_large_their_sum(dtype):
    values = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert _is_finite(values, None)
    for value in (math.inf, -math.inf, math.nan):
        values[17] = value
        assert not _is_finite(values, None)
    values[18] = math.inf  # beside one of the other sign
    values[17] = -math.inf
    assert not _is_finite(values, None)


def test_what_travels_as_a_half_must_fit_into_it():
    values = torch.zeros(1000)
    for value, fits in ((65504.0, True), (-65504.0, True), (65536.0, False), (-1e6, False), (math.nan, False)):
        values[17] = value
        assert _is_finite(values, 65504.0) == fits


@both
@pytest.mark.parametrize("late", [False, True], ids=["early streams", "late streams"])
@pytest.mark.parametrize("how", ["crossing", "barrier", "scaler"])
def test_gradients_of_a_device_are_looked_at_in_their_copy(two_ranks, backend, late, how):
    case = {"backend": backend, "culprit": 1, "how": how, "value": math.nan}
    for kind, text, rank, _, finite, _ in two_ranks.run("tests.live.faults:not_finite_with_streams", late=late, **case):
        named = "" if how == "scaler" else "iteration 4: the gradient of layers.3.weight on rank 1 is infinite or NaN"
        assert (kind, rank, finite) == (("", None, True) if how == "scaler" else ("NotFiniteError", 1, True))
        assert text.startswith(named)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"check_finite": True}, "check_finite looks at gradients in CPU memory"),
        ({"order": "coordinator"}, "order: got 'coordinator' for sums over NCCL"),
        ({"weight": 2}, "weight: got 2 for sums over NCCL"),
    ],
    ids=["check_finite", "order", "weight"],
)
def test_what_sums_in_streams_do_not_have_is_refused(two_ranks, option, said):
    for text in two_ranks.run("tests.live.faults:refused_in_streams", **option):
        assert text.startswith(said)


def test_a_rank_that_is_told_raises_the_same_error():
    error = NotFiniteError("iteration 4: ...", 2)
    told = Cause.of(error).error(2, str(error))
    assert isinstance(told, NotFiniteError)
    assert (str(told), told.rank) == (str(error), 2)


def test_the_option_is_true_or_false():
    with pytest.raises(InputError, match="check_finite"):
        SteppingOptions(check_finite="raise")
