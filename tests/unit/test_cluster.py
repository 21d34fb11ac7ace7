from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from gradlane.core import files
from gradlane.core.cluster import Cluster, Host, Link, RateStep, Server, Worker, random_steps
from gradlane.errors import FormatError, InputError


def test_a_link_without_schedule_takes_size_over_rate_rounded_up():
    assert Link(3 * 10**9).finish_ns(100, 4) == 102


def test_a_link_slows_down_and_speeds_up_as_scheduled():
    link = Link(10**9, (RateStep(10, 5 * 10**8), RateStep(30, 2 * 10**9)))
    assert [link.at(now) for now in (0, 9, 10, 29, 30, 10**9)] == [
        (10**9, 10),
        (10**9, 10),
        (5 * 10**8, 30),
        (5 * 10**8, 30),
        (2 * 10**9, None),
        (2 * 10**9, None),
    ]
    # 10 bytes by 10, 10 more by 30, the last 20 by 40
    assert [link.finish_ns(0, size) for size in (10, 11, 20, 40)] == [10, 12, 30, 40]
    assert link.fastest == 2 * 10**9


@given(
    gaps=st.lists(st.integers(1, 50), max_size=6),
    rates=st.lists(st.integers(1, 4), min_size=6, max_size=6),
    start=st.integers(0, 100),
    size=st.integers(1, 200),
)
def test_a_schedule_is_followed_nanosecond_by_nanosecond(gaps, rates, start, size):
    steps, at = [], 0
    for gap, rate in zip(gaps, rates, strict=False):
        at += gap
        steps.append(RateStep(at, rate * 10**9))
    link = Link(10**9, tuple(steps))
    now, left = start, size
    while left > 0:
        left -= next((step.bytes_per_second for step in reversed(steps) if step.at_ns <= now), 10**9) // 10**9
        now += 1
    assert link.finish_ns(start, size) == now
    assert link.carried_bytes(start, now) == size - left
    assert link.carried_bytes(start, now - 1) < size


def test_random_steps_are_the_same_for_a_seed_and_others_for_another():
    steps = random_steps(7, 10, 20, 1_000, 50)
    assert steps == random_steps(7, 10, 20, 1_000, 50)
    assert steps != random_steps(8, 10, 20, 1_000, 50)
    assert [step.at_ns for step in steps[:3]] == [0, 1_000, 2_000]
    assert {10 <= step.bytes_per_second <= 20 for step in steps} == {True}


@pytest.mark.parametrize(
    ("cluster", "rate"),
    [
        (Cluster.homogeneous(4, 4, 1000), 1000),
        (Cluster.homogeneous(4, 2, 1000), 500),  # each server has half of the bytes of four workers
        (Cluster.homogeneous(4, 8, 1000), 1000),
        # a host sends and receives 3/4 of its gradients and 3/4 of what its server has for the others: 2 (n-1) / n
        (Cluster.homogeneous(4, 4, 1500, colocated=True), 1000),
        (Cluster.homogeneous(1, 1, 1500, colocated=True), 10**13),
        # each device sends its own: two hosts of four send as many bytes as eight
        (Cluster.homogeneous(8, 2, 1000, devices=4), 250),
        (Cluster.homogeneous(8, 2, 1000, devices=4, colocated=True), 250),
    ],
)
def test_the_rate_to_plan_from_is_that_of_the_narrowest_link(cluster, rate):
    assert cluster.as_network().bytes_per_second == rate
    assert cluster.is_homogeneous


@pytest.mark.parametrize(
    ("cluster", "times"),
    [
        (Cluster.homogeneous(3, 1, 3000), 3),  # one server has the bytes of three workers
        (Cluster.homogeneous(4, 2, 1000), 2),
        (Cluster.homogeneous(4, 4, 1000), UNSET),
        (Cluster.homogeneous(4, 4, 1500, colocated=True), UNSET),  # the link that a worker shares with its server is its own
        (
            Cluster((Host(Link(4000), Link(4000)), *(Host(Link(1000), Link(1000)),) * 2), (Worker(1), Worker(2)), (Server(0),)),
            UNSET,
        ),
    ],
)
def test_a_workers_own_link_is_faster_where_a_servers_holds_all_back(cluster, times):
    network = cluster.as_network()
    assert network.own_link == times
    assert network.own_links.bytes_per_second == network.bytes_per_second * (1 if times is UNSET else times)
    assert network.own_links.own_link is UNSET


LINK, SLOW = Link(1000), Link(500)


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster((Host(LINK, LINK),) * 3, (Worker(0), Worker(1, 150)), (Server(2),)),
        Cluster((Host(LINK, LINK),) * 3, (Worker(0), Worker(0), Worker(1)), (Server(2),)),
        Cluster((Host(LINK, LINK),) * 3, (Worker(0), Worker(1)), (Server(1),)),
        Cluster((Host(LINK, LINK),) * 4, (Worker(0), Worker(1)), (Server(2), Server(3, 2))),
        Cluster((Host(LINK, LINK), Host(LINK, SLOW), Host(LINK, LINK)), (Worker(0), Worker(1)), (Server(2),)),
    ],
)
def test_workers_in_different_positions_are_not_alike(cluster):
    assert not cluster.is_homogeneous


def test_a_cluster_is_written_and_read_back():
    link = Link(1000, (RateStep(5, 10),))
    cluster = Cluster((Host(link, LINK),) * 2, (Worker(0, 120),), (Server(1, 3),), 5, 10**9, None, 2, 30_000, "by hand")
    assert files.loads(files.dumps(cluster), Cluster) == cluster
    broken = files.dumps(cluster).replace(b'"compute_percent":120', b'"compute_percent":-1')
    with pytest.raises(FormatError, match=r"compute_percent: got -1.*\$\.body\.workers\[0\]"):
        files.loads(broken, Cluster)


def test_a_worker_on_a_host_that_is_not_there_is_refused():
    with pytest.raises(InputError, match=r"workers\[0\]\.host: got 1, expected below 1"):
        Cluster((Host(LINK, LINK),), (Worker(1),), (Server(0),))
