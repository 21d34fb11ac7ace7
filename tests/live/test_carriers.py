"""What carries the messages is chosen while a job trains, where no backend is named."""

from __future__ import annotations

import pytest

from tests.live.ranks import Ranks

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize(("lost", "silently"), [(0, False), (1, False), (1, True)])
def test_where_the_own_ports_cannot_be_reached_one_line_says_so_and_all_reduce_carries(two_ranks, lost, silently):
    found = two_ranks.run("tests.live.carriers:falls_back", lost=lost, silently=silently, steps=12)
    for each in found:
        assert each["differs"] == []
        assert each["losses"]
        assert each["carrier"] == "AllReduceBackend"
        assert each["backend"]
        assert each["threads"] == []
        assert each["took_s"] < 20
        assert each["more_sockets"] <= 0
    (line,) = [line for line in found[0]["lines"] if "ports" in line]
    assert line.startswith("gradlane: all-reduce carries all messages, since gradlane's own ports cannot be reached: rank ")
    named = f"rank {1 - lost} at {found[lost]['dialled']}"
    if silently:  # either may give up first
        assert f"rank {lost}: transport: no connection with {named}" in line or f"no connection with rank {lost} within" in line
        assert " 127.0.0.1:" in line
    else:
        assert f"rank {lost}: transport: {named}: cannot be reached: Connection refused" in line
    assert not [line for line in found[1]["lines"] if "ports" in line]


@pytest.mark.parametrize(("backend", "carrier"), [("all-reduce", "AllReduceBackend"), ("server", "ParameterServerBackend")])
def test_whoever_names_a_backend_gets_it(two_ranks, backend, carrier):
    for found in two_ranks.run("tests.live.carriers:named", backend=backend):
        assert found == (carrier, "UNSET")


def test_a_timeline_leaves_the_network_of_its_plan_and_a_profile_that_of_an_all_reduce(two_ranks, tmp_path):
    assert two_ranks.run("tests.live.carriers:networks_left", folder=str(tmp_path)) == [("Cluster", "Network")] * 2


@pytest.mark.parametrize(
    "name",
    ["accumulation_with_no_sync", "clip_grad_norm", "deep_copies_in_mid_flight", "a_branch_left_out_by_one_rank_only"],
)
def test_a_loop_whose_carrier_changes_in_every_second_iteration_gives_the_bits_of_ddp(two_ranks, name):
    for found in two_ranks.run("tests.live.loops:compare", name=name, arms=["hopping between carriers"]):
        assert [(one["error"], one["differs"]) for one in found.values()] == [("", [])]


def test_the_failure_of_a_node_that_carries_nothing_ends_the_job_when_it_is_to_carry_a_plan():
    ranks = Ranks(2)
    try:
        for text, carriers, took_s in ranks.run("tests.live.carriers:the_idle_node_fails"):
            assert "ended by the test" in text
            assert "all-reduce" in carriers
            assert took_s < 20
    finally:
        ranks.close()


def test_a_session_with_both_carriers_leaves_no_thread_and_no_socket(two_ranks):
    for sockets, threads, ours in two_ranks.run("tests.live.carriers:what_is_left", times=3):
        assert sockets <= 0
        assert threads <= 0
        assert ours == 0
