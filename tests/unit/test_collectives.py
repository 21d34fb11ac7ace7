from __future__ import annotations

from fractions import Fraction

import pytest

from gradlane.core.bus import Bus
from gradlane.core.collectives import ALGORITHMS, all_reduce, flat_ring
from gradlane.core.fields import MAX_RATE
from gradlane.core.network import Network
from gradlane.errors import InputError

# alpha 10 us, beta 1 ns a byte, gamma 0.25 ns a byte
COSTS = {"startup_ns": 10_000, "bytes_per_second": 10**9, "sum_bytes_per_second": 4 * 10**9}


@pytest.mark.parametrize(
    ("algorithm", "startup_ns", "megabyte_ns"),
    [
        # a, and a + 10^6 b, of MG-WFBP Table 2 for 8 workers
        ("binary-tree", 60_000, 60_000 + 6_750_000),
        ("recursive-doubling", 30_000, 30_000 + 3_750_000),
        ("halving-doubling", 60_000, 60_000 + 1_968_750),
        ("double-binary-trees", 60_000, 60_000 + 2_250_000),  # with 2 beta for the table's beta
        ("ring", 140_000, 140_000 + 1_968_750),
    ],
)
def test_an_algorithm_costs_what_table_2_says(algorithm, startup_ns, megabyte_ns):
    network = all_reduce(algorithm, 8, **COSTS)
    assert network.startup_ns == startup_ns
    # the rate is an integer, so that a megabyte may be a few nanoseconds off
    assert network.cost_ns(10**6) == pytest.approx(megabyte_ns, abs=20)
    assert (network.workers, network.algorithm) == (8, algorithm)


def test_the_papers_own_row_of_double_binary_trees_is_kept_for_its_figures():
    assert all_reduce("double-binary-trees", 8, **COSTS, as_printed=True).cost_ns(10**6) == 60_000 + 1_250_000
    printed, planned = (all_reduce("ring", 8, **COSTS, as_printed=each) for each in (True, False))
    assert printed == planned


@pytest.mark.parametrize("sum_bytes_per_second", [None, 4 * 10**9])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_all_reduce_sends_less_than_each_worker_has_to(algorithm, sum_bytes_per_second):
    for workers in (2, 3, 4, 5, 16, 100, 128, 2048):
        for rate in (10**9, 1_250_000_000, 7):
            network = all_reduce(
                algorithm, workers, startup_ns=0, bytes_per_second=rate, sum_bytes_per_second=sum_bytes_per_second
            )
            for size_bytes in (1, 1_000, 10**9):
                assert network.cost_ns(size_bytes) >= Fraction(2 * (workers - 1), workers) * size_bytes * 10**9 / rate


@pytest.mark.parametrize("crossings", [1, 2, 4])
def test_no_flat_ring_sends_less_between_hosts_than_these_have_to(crossings):
    bus = Bus(4, 0, 10**11)
    for hosts in (2, 3, 16):
        network = flat_ring(hosts, bus, startup_ns=0, bytes_per_second=10**9, crossings=crossings)
        assert network.cost_ns(10**8) >= Fraction(2 * (hosts - 1), hosts) * 10**8


def test_a_ring_moves_the_bytes_twice_but_for_one_share_whatever_the_number_of_workers():
    for workers in (2, 3, 16, 2048):
        network = all_reduce("ring", workers, startup_ns=0, bytes_per_second=10**9)
        assert network.cost_ns(10**8) == pytest.approx(2 * (workers - 1) / workers * 10**8, rel=1e-7)


def test_the_steps_of_a_tree_are_whole():
    startups = [all_reduce("recursive-doubling", n, startup_ns=1, bytes_per_second=1).startup_ns for n in (2, 3, 4, 5, 2048)]
    assert startups == [1, 2, 2, 3, 11]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_worker_sends_nothing(algorithm):
    alone = all_reduce(algorithm, 1, **COSTS)
    assert (alone.startup_ns, alone.bytes_per_second) == (0, MAX_RATE)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("butterfly", 2), "algorithm: got 'butterfly', expected one of binary-tree, recursive-doubling"),
        (("ring", 0), "workers: got 0"),
    ],
)
def test_what_is_no_algorithm_or_no_number_of_workers_is_refused(arguments, fault):
    with pytest.raises(InputError, match=fault):
        all_reduce(*arguments, startup_ns=0, bytes_per_second=1)


def test_a_message_in_parts_never_costs_less_than_whole():
    network = Network.line(2, 0, 3 * 10**9)
    assert [network.cost_ns(size) for size in (1, 3, 4, 6)] == [1, 1, 2, 2]
