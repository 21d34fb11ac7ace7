"""What a system of the papers needs beyond its plan, in a running job."""

from __future__ import annotations

import pytest

from gradlane.cli.launch import launch
from gradlane.errors import InputError
from tests.commands import EXAMPLE
from tests.live.test_equality import GIVEN

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("options", [{}, {"order": "coordinator"}, {"backend": "server"}])
def test_under_dear_second_halves_begin_when_all_first_halves_have_ended_and_go_in_the_order_of_the_forward_pass(
    two_ranks, options
):
    for iterations in two_ranks.run("tests.live.systems:halves", **options):
        assert len(iterations) > 4
        for order in iterations:
            assert sorted(order["send"]) == sorted(order["receive"])
            assert len(order["send"]) > 2
            # messages are numbered as gradients become ready, the last layer's first
            assert order["receive"] == sorted(order["receive"], reverse=True)


def test_over_all_reduce_geryons_lanes_are_marked_and_nothing_else_is(four_ranks):
    for of_lanes, others in four_ranks.run("tests.live.systems:marks_of_groups"):
        assert of_lanes == [[(46 << 2, 6)] * 3, [(34 << 2, 5)] * 3]
        assert set(others) == {(0, 0)}


def test_where_a_group_s_connections_are_not_found_all_ranks_hear_it(two_ranks):
    for said in two_ranks.run("tests.live.systems:geryon_without_its_sockets"):
        # a rank may hear of the other's error before it finds its own
        assert "UnsupportedError: the plan's lanes ask for classes in the network, and a rank finds 0 of the" in said


@pytest.mark.parametrize("backend", ["all-reduce", "server"])
def test_a_job_of_more_weight_has_more_connections_and_the_bits_of_ddp(two_ranks, backend):
    policies = [
        ("bytescheduler", {"partition_bytes": 8000, "credit_bytes": 16000}),
        ("geryon", {"slice_bytes": 8000}),
        ("dear", {}),
    ]
    options = {"model": "convolutions", "optimizer": "sgd", "policies": policies, "network": GIVEN, "steps": 10}
    outcomes = two_ranks.run("tests.live.cases:equals_ddp", backend=backend, weight=3, **options)
    assert outcomes == [{str(policy): [] for policy in policies}] * 2


def test_launch_refuses_a_weight_of_no_use():
    with pytest.raises(InputError, match="--weight: got '9', expected an integer from 1 to 8"):
        launch(["--nproc", "1", "--weight", "9", str(EXAMPLE)])
