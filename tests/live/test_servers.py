"""Sessions over the own transport: what holds there and not over all-reduce."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gradlane import policies
from gradlane.core.network import Network
from gradlane.core.plan import Lane, Plan
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.live.backends.parameter_server import wire_lanes
from gradlane.transport import Node, NodeOptions, WireLane
from tests.live.cases import differences
from tests.live.ranks import Ranks

pytestmark = pytest.mark.matrix

ONE = Profile("one", "none", (TensorProfile(TensorSpec("a", 8), 0, 0),), (Layer("only", 1),), 0)


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.close()


def test_in_rank_order_three_ranks_get_the_same_bits_under_every_policy(three_ranks):
    outcomes = three_ranks.run("tests.live.servers:train_under_each", summation_order="rank")
    first = outcomes[0]["wfbp"]
    for outcome in outcomes:
        assert len(outcome) == 5
        for policy, bits in outcome.items():
            assert differences(first, bits) == [], policy


def test_in_order_of_arrival_three_ranks_end_alike_and_as_in_rank_order_but_for_rounding(three_ranks):
    in_rank_order = three_ranks.run("tests.live.servers:train_under_each", summation_order="rank", only="wfbp")[0]["wfbp"]
    by_arrival = [outcome["wfbp"] for outcome in three_ranks.run("tests.live.servers:train_under_each", only="wfbp")]
    for bits in by_arrival:
        assert differences(by_arrival[0], bits) == []
        for name, value in in_rank_order.items():
            torch.testing.assert_close(bits[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shared", ["0", "1"])
def test_two_hundred_iterations_leave_memory_threads_and_descriptors_as_they_were(two_ranks, shared):
    for soak in two_ranks.run("tests.live.servers:soak", warm_up=100, iterations=200, shared=shared):
        # fewer: something that an earlier session of the process gave back went only now
        assert all(soak["after"][what] <= count for what, count in soak["before"].items()), soak
        assert soak["grown_bytes"] < 2**20
        assert soak["held_bytes"] == 0
        if shared == "0":
            assert 0 < soak["most_held_bytes"] <= soak["announced_bytes"]
        else:
            assert soak["most_held_bytes"] == soak["announced_bytes"] == 0


@pytest.mark.parametrize(
    "name",
    [
        "accumulation_with_no_sync",
        "clip_grad_norm",
        "deep_copies_in_mid_flight",
        "each_rank_in_a_branch_of_its_own",
        "a_branch_left_out_by_one_rank_only",
        "readiness_in_another_order_on_each_rank",
        "reentrant_checkpoints",
        "two_dtypes_in_one_model",
        "a_bfloat16_model",
    ],
)
def test_a_loop_gives_the_bits_of_ddp(two_ranks, name):
    for found in two_ranks.run("tests.live.loops:compare", name=name, arms=["bytescheduler over servers"]):
        assert [(one["error"], one["differs"]) for one in found.values()] == [("", [])]


def test_ranks_whose_windows_hold_different_messages_do_not_wait_for_one_another():
    def member(rank: int) -> NodeOptions:
        return NodeOptions(world=2, servers=2, rank=rank, server=rank, linger_s=0.1)

    parts = [[torch.full((1000,), float(10 * rank + message)) for message in range(2)] for rank in range(2)]
    with Node(member(0)) as zero, Node(member(1)) as one:
        zero.dial(1, "127.0.0.1", one.port)
        one.dial(0, "127.0.0.1", zero.port)
        for node, mine in ((zero, parts[0]), (one, parts[1])):
            node.join(10)
            for message, data in enumerate(mine):
                node.define(message, data.data_ptr(), 4000, "float32")
        for node, first in ((zero, 0), (one, 1)):
            node.push(first, notify_sent=True)
            assert node.take(10) == [~first]
        for node, second in ((zero, 1), (one, 0)):
            node.push(second)
        for node in (zero, one):
            for message in range(2):
                node.wait(message, 10)
    for mine in parts:
        assert [data.unique().tolist() for data in mine] == [[10.0], [12.0]]


def _plan(*classes: int) -> Plan:
    plan = policies.get("wfbp").plan(ONE, Network.line(2, 0, 10**9))
    return Plan(plan.policy, plan.model, plan.tensors, plan.messages, tuple(Lane(network_priority=each) for each in classes))


def test_lanes_are_marked_where_a_plan_asks_for_classes():
    assert wire_lanes(_plan(0)) == (WireLane(0, 0),)
    assert wire_lanes(_plan(0, 0)) == (WireLane(0, 0), WireLane(0, 0))
    assert wire_lanes(_plan(0, 1)) == (WireLane(46, 6), WireLane(34, 5))
    assert wire_lanes(_plan(2, 3, 4, 5, 7)) == (
        WireLane(26, 4),
        WireLane(18, 3),
        WireLane(10, 2),
        WireLane(0, 1),
        WireLane(0, 0),
    )
