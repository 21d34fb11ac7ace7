"""Scripts that clip gradients by their norm cross the barrier under `owners`, with the bits of DDP."""

from __future__ import annotations

import math

import pytest

from tests.live.clipping import SCALED, WAYS
from tests.live.ranks import Ranks

pytestmark = pytest.mark.matrix
READS_SUMS = {
    "of another order than the plan's", "twice", "and read", "the norm of what was scaled", "in other forms", "given twice",
    "by what torch refuses", "limited by what torch refuses", "limited by tensors",
    "limited by tensors and clipped", "without NaN elsewhere",
    "unscaled, of another order than the plan's", "unscaled and scaled once more", "unscaled after clipping",
    "unscaled by another scale on each rank", "unscaled by another scale in each step", "unscaled by a fused optimizer",
}  # fmt: skip
"""They need sums before the step."""


@pytest.mark.parametrize("backend", ["all-reduce", "server"])
@pytest.mark.parametrize("way", [*WAYS, *SCALED])
def test_norms_and_parameters_have_the_bits_of_ddp_and_updates_are_deferred_unless_sums_are_read(two_ranks, way, backend):
    for differs, deferred in two_ranks.run("tests.live.clipping:beside_ddp", way=way, backend=backend):
        assert differs == []
        assert (deferred > 0) == (way not in READS_SUMS)


@pytest.mark.parametrize("late", [False, True], ids=["early streams", "late streams"])
@pytest.mark.parametrize(("backend", "orders"), [("server", False), ("all-reduce", False), ("all-reduce", True)])
@pytest.mark.parametrize("way", [*WAYS, *SCALED])
def test_norms_of_a_device_have_the_bits_of_ddp_too(two_ranks, way, backend, orders, late):
    case = {"way": way, "backend": backend, "orders": orders, "late": late}
    for differs, deferred in two_ranks.run("tests.live.clipping:beside_ddp_with_streams", **case):
        assert differs == []
        assert deferred or not late or way in READS_SUMS  # a read of a sum that is queued on a device does not wait for it


@pytest.mark.parametrize(("backend", "orders"), [("server", False), ("all-reduce", False), ("all-reduce", True)])
@pytest.mark.parametrize("options", [{}, {"wire_dtype": "bf16"}, {"dtype": "bfloat16"}], ids=str)
def test_verified_steps_of_a_device_are_those_of_ddp(two_ranks, backend, orders, options):
    case = {"way": "by torch", "backend": backend, "orders": orders, "late": True, "verify": True, **options}
    for differs, deferred in two_ranks.run("tests.live.clipping:beside_ddp_with_streams", **case):
        assert differs == [] or "wire_dtype" in options
        assert deferred > 0


@pytest.mark.parametrize(
    ("fault", "backend", "orders"),
    [
        ("the script's stream does not wait for norms", "all-reduce", True),
        ("the host does not wait for norms", "all-reduce", False),
        ("the host does not wait for norms", "server", False),
    ],
)
def test_norms_of_a_device_that_nobody_waits_for_are_found(two_ranks, fault, backend, orders):
    case = {"way": "by torch", "backend": backend, "orders": orders, "late": True, "fault": fault}
    for ok, answer in two_ranks.try_run("tests.live.clipping:beside_ddp_with_streams", **case):
        if orders:
            assert not ok
            assert "uses of memory are not ordered" in answer[1]
        else:  # the host reads norms that the device has not written yet
            assert ok
            assert any(name.startswith("seen in step") for name in answer[0])


@pytest.mark.parametrize(
    ("way", "norm"),
    [
        ("in two calls", 2.0),
        ("of order infinity", math.inf),
        ("and read", None),
        ("unscaled by the step", 2.0),
        ("unscaled, of order infinity", math.inf),
    ],
)
@pytest.mark.parametrize("orders", [False, True])
def test_on_a_device_too_a_plan_is_ranked_for_a_script_that_reads_norms_alone(two_ranks, way, norm, orders):
    assert two_ranks.run("tests.live.clipping:norms_learned", way=way, orders=orders) == [norm, norm]


@pytest.mark.parametrize("when", ["before backward", "before clipping"])
@pytest.mark.parametrize("backend", ["all-reduce", "server"])
def test_norms_have_the_bits_that_the_script_would_compute_with_as_many_threads(two_ranks, backend, when):
    assert two_ranks.run("tests.live.clipping:beside_ddp_with_fewer_threads", backend=backend, when=when) == [[], []]


@pytest.mark.parametrize("way", ["by torch", "by value"])
def test_sums_that_come_in_time_by_themselves_are_no_reason_to_keep_the_barrier(two_ranks, way):
    assert two_ranks.run("tests.live.clipping:crosses_though_sums_come_in_time", way=way) == [True, True]


@pytest.mark.parametrize("backend", ["all-reduce", "server"])
@pytest.mark.parametrize(
    "way",
    [
        "by torch", "by hand", "scaled alone", "by value", "without NaN", "unscaled and clipped", "unscaled by the step",
        "unscaled and left out", "unscaled by a fused optimizer",
    ],
)  # fmt: skip
def test_verified_steps_are_those_of_ddp(two_ranks, way, backend):
    for differs, deferred in two_ranks.run("tests.live.clipping:beside_ddp", way=way, backend=backend, verify=True):
        assert differs == []
        assert deferred > 0 or way in READS_SUMS


@pytest.mark.parametrize("way", ["by torch", "norms that are kept", "unscaled and clipped", "unscaled by no power of two"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("backend", ["all-reduce", "server"])
def test_parameters_of_another_dtype_have_norms_of_it(two_ranks, way, dtype, backend):
    for differs, deferred in two_ranks.run("tests.live.clipping:beside_ddp", way=way, dtype=dtype, backend=backend):
        assert differs == []
        assert deferred > 0


@pytest.mark.parametrize("policy", ["bytescheduler", "blocks"])
@pytest.mark.parametrize("way", ["scaled alone", "by value", "without NaN"])
def test_a_gradient_that_is_changed_and_not_read_waits_for_no_sum_under_any_policy(two_ranks, way, policy):
    for differs, deferred in two_ranks.run("tests.live.clipping:beside_ddp", way=way, policy=policy):
        assert differs == []
        assert deferred > 0


@pytest.mark.parametrize("how", ["beside_ddp", "beside_ddp_with_streams"])
@pytest.mark.parametrize("way", ["by torch", "unscaled by the step"])
def test_where_a_policy_tells_no_norms_they_wait_for_sums_and_nothing_is_deferred_in_vain(two_ranks, way, how):
    streams = {"late": True, "orders": True} if how == "beside_ddp_with_streams" else {}
    for differs, deferred in two_ranks.run(f"tests.live.clipping:{how}", way=way, policy="bytescheduler", **streams):
        assert (differs, deferred) == ([], 0)


@pytest.mark.parametrize("way", ["by torch", "unscaled and clipped"])
def test_gradients_that_travel_as_halves_are_verified_with_their_norms(two_ranks, way):
    for _, deferred in two_ranks.run("tests.live.clipping:beside_ddp", way=way, verify=True, wire_dtype="bf16"):
        assert deferred > 0


@pytest.mark.parametrize("way", ["by torch", "by hand"])
@pytest.mark.parametrize("backend", ["all-reduce", "server"])
def test_four_ranks_end_alike(four_ranks, way, backend):
    first, *others = four_ranks.run("tests.live.clipping:ends_alike", way=way, backend=backend)
    assert others == [first] * 3


@pytest.mark.parametrize(("backend", "orders"), [("server", False), ("all-reduce", False), ("all-reduce", True)])
def test_four_ranks_with_devices_end_alike(four_ranks, backend, orders):
    case = {"way": "by torch", "backend": backend, "orders": orders}
    first, *others = four_ranks.run("tests.live.clipping:ends_alike_with_streams", **case)
    assert others == [first] * 3


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("backend", ["all-reduce", "server"])
def test_a_rank_that_is_killed_before_it_sends_its_norms_ends_the_job_by_its_name(culprit, backend):
    ranks = Ranks(3)  # of its own: one is killed
    try:
        outcomes = ranks.try_run("tests.live.clipping:one_dies_before_its_norms", culprit=culprit, backend=backend)
    finally:
        ranks.kill()
    assert outcomes.pop(culprit) == (False, ("ProcessEnded", "exit code -9", ""))
    for ok, (error, are_missing) in outcomes:
        assert ok
        assert error.startswith(f"PeerDied: rank {culprit} is gone: its process ended")
        assert are_missing
