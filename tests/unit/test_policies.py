from __future__ import annotations

from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradlane import policies
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.policies.blocks import Blocks
from gradlane.policies.mg_wfbp_exact import merge_exactly
from gradlane.testing.generators import networks, profile_of, profiles

MIB = 2**20


def groups(plan: Plan) -> list[list[int]]:
    return [[piece.tensor for piece in message.slices] for message in plan.messages]


def arrival(profile: Profile, network: Network, cuts: list[list[int]]) -> int:
    """When the last of these messages arrives, sent one after the other, each when its tensors are ready."""
    end = 0
    for group in cuts:
        ready = max(profile.tensors[tensor].ready_ns for tensor in group)
        end = max(end, ready) + network.cost_ns(sum(profile.tensors[tensor].spec.size_bytes for tensor in group))
    return end


def all_merges(count: int) -> list[list[list[int]]]:
    """Every way of cutting 0..count-1 into runs: 2^(count-1) of them."""
    merges = []
    for cuts in product([False, True], repeat=count - 1):
        groups = [[0]]
        for tensor, cut in enumerate(cuts, start=1):
            if cut:
                groups.append([])
            groups[-1].append(tensor)
        merges.append(groups)
    return merges


# -- MG-WFBP ---------------------------------------------------------------------------------------------


def test_the_greedy_merge_ends_at_203_where_the_exact_one_ends_at_202():
    # a unit is 4 bytes; a = 50, b = 1 a unit
    profile = profile_of((0, 400), (1, 4), (100, 4))
    network = Network.line(2, startup_ns=50, bytes_per_second=4 * 10**9)
    greedy = groups(policies.get("mg-wfbp").plan(profile, network))
    exact = groups(policies.get("mg-wfbp-exact").plan(profile, network))
    assert greedy == [[0, 1], [2]]
    assert arrival(profile, network, greedy) == 203
    assert exact == [[0], [1, 2]]
    assert arrival(profile, network, exact) == 202


def algorithm_1(a: int, b: int, t_b: list[int], p: list[int]) -> list[bool]:
    """MG-WFBP Algorithm 1, line by line; index 0 is unused. Returns for each layer whether it is merged."""
    L = len(p) - 1
    p = list(p)
    t_c = [0, *(a + b * p[layer] for layer in range(1, L + 1))]
    tau_b = [0] * (L + 1)
    merged = [False] * (L + 1)

    def calculate_comm_start() -> list[int]:
        tau_c = [0] * (L + 1)
        tau_c[L] = tau_b[L] + t_b[L]
        for layer in range(L - 1, 0, -1):
            tau_c[layer] = max(tau_c[layer + 1] + t_c[layer + 1], tau_b[layer] + t_b[layer])
        return tau_c

    for layer in range(L - 1, 0, -1):
        tau_b[layer] = tau_b[layer + 1] + t_b[layer + 1]
    tau_c = calculate_comm_start()
    for layer in range(L, 1, -1):
        if tau_b[layer - 1] + t_b[layer - 1] - tau_c[layer] < a:
            t_c[layer] = 0
            p[layer - 1] += p[layer]
            t_c[layer - 1] = a + b * p[layer - 1]
            tau_c = calculate_comm_start()
            merged[layer] = True
    return merged


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    layers=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=20),
    a=st.integers(0, 60),
    b=st.integers(1, 3),
)
def test_the_greedy_merge_is_algorithm_1_of_the_paper(layers, a, b):
    # as the papers count: layer L is the first to finish in backward
    count = len(layers)
    t_b = [0, *(time for time, _ in reversed(layers))]
    p = [0, *(4 * units for _, units in reversed(layers))]
    merged = algorithm_1(a, b, t_b, p)
    expected: list[list[int]] = [[]]
    for tensor in range(count):
        expected[-1].append(tensor)
        if tensor < count - 1 and not merged[count - tensor]:
            expected.append([])
    ready = [sum(time for time, _ in layers[: tensor + 1]) for tensor in range(count)]
    profile = profile_of(*((ready[tensor], 4 * units) for tensor, (_, units) in enumerate(layers)))
    # the rate of b nanoseconds a byte; rounding it costs less than a nanosecond at these sizes
    network = Network.line(2, a, {1: 10**9, 2: 5 * 10**8, 3: 333_333_334}[b])
    assert network.cost_ns(2400) == a + b * 2400
    assert groups(policies.get("mg-wfbp").plan(profile, network)) == expected


@settings(max_examples=60, deadline=None)
@given(profile=profiles(max_tensors=9), network=networks())
def test_the_exact_merge_is_the_best_of_all_merges(profile, network):
    one_dtype = [
        merge
        for merge in all_merges(len(profile.tensors))
        if all(len({profile.tensors[tensor].spec.dtype for tensor in group}) == 1 for group in merge)
    ]
    best = min(arrival(profile, network, merge) for merge in one_dtype)
    exact = groups(policies.get("mg-wfbp-exact").plan(profile, network))
    assert arrival(profile, network, exact) == best


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(profile=profiles(), network=networks())
def test_no_other_plan_of_whole_tensors_arrives_before_the_exact_merge(profile, network):
    exact = arrival(profile, network, groups(policies.get("mg-wfbp-exact").plan(profile, network)))
    for name in ("mg-wfbp", "wfbp", "ddp", "sync-easgd"):
        assert exact <= arrival(profile, network, groups(policies.get(name).plan(profile, network)))


def test_neither_merge_reaches_across_a_change_of_dtype():
    profile = profile_of((0, 8), (0, 8), (0, 8), (0, 8), dtypes=["float32", "float32", "float16", "float32"])
    network = Network.line(2, 10**6, 10**9)
    for name in ("mg-wfbp", "mg-wfbp-exact"):
        assert groups(policies.get(name).plan(profile, network)) == [[0, 1], [2], [3]]


# -- DDP, SyncEASGD, WFBP ---------------------------------------------------------------------------------


def test_ddp_closes_a_small_first_bucket_and_then_buckets_that_reach_the_cap():
    sizes = [MIB // 2, MIB // 2, 24 * MIB, 4, MIB, 30 * MIB, 8, 8]
    profile = profile_of(*((index, size) for index, size in enumerate(sizes)))
    plan = policies.get("ddp").plan(profile, Network.line(2, 0, 1))
    assert groups(plan) == [[0, 1], [2, 3, 4], [5], [6, 7]]
    assert not plan.crosses_barrier


def test_a_ddp_bucket_ends_where_the_dtype_changes_and_counts_anew():
    sizes = [MIB, 20 * MIB, 20 * MIB, 4 * MIB, 4 * MIB]
    dtypes = ["float32", "float32", "float16", "float16", "float16"]
    profile = profile_of(*((index, size) for index, size in enumerate(sizes)), dtypes=dtypes)
    assert groups(policies.get("ddp").plan(profile, Network.line(2, 0, 1))) == [[0], [1], [2, 3, 4]]


def test_sync_easgd_sends_one_message_a_dtype_run():
    profile = profile_of((0, 8), (1, 8), (2, 8), (3, 8), dtypes=["float32", "float32", "float16", "float32"])
    assert groups(policies.get("sync-easgd").plan(profile, Network.line(2, 0, 1))) == [[0, 1], [2], [3]]


def test_wfbp_sends_a_message_a_tensor_without_priorities():
    plan = policies.get("wfbp").plan(profile_of((0, 8), (1, 8), (2, 8)), Network.line(2, 0, 1))
    assert groups(plan) == [[0], [1], [2]]
    assert {message.priority for message in plan.messages} == {0}


# -- priorities -------------------------------------------------------------------------------------------

# t0 and t1 of the last layer, t2 of the middle one, t3 a token embedding used first, t4 tied to layer 0
SHARED = {"layers": [2, 2, 1, 0, 0]}


def test_tictac_ranks_tensors_by_first_use_and_within_a_layer_against_readiness():
    profile = profile_of((0, 8), (0, 8), (5, 8), (9, 8), (9, 8), **SHARED)
    plan = policies.get("tictac").plan(profile, Network.line(2, 0, 1))
    assert [message.priority for message in plan.messages] == [4, 3, 2, 1, 0]
    assert groups(plan) == [[0], [1], [2], [3], [4]]
    assert plan.crosses_barrier


def test_the_order_of_first_use_decides_and_not_that_of_readiness():
    # the first gradient to be ready belongs to a parameter that the forward pass uses first
    profile = profile_of((0, 8), (1, 8), (2, 8), layers=[0, 2, 1])
    plan = policies.get("tictac").plan(profile, Network.line(2, 0, 1))
    assert [message.priority for message in plan.messages] == [0, 2, 1]


def test_p3_cuts_to_its_slice_and_keeps_the_priority_of_the_tensor():
    profile = profile_of((0, 20), (1, 8))
    plan = policies.get("p3", slice_bytes=8).plan(profile, Network.line(2, 0, 1))
    assert [(m.slices[0].tensor, m.slices[0].offset_bytes, m.size_bytes, m.priority) for m in plan.messages] == [
        (0, 0, 8, 1),
        (0, 8, 8, 1),
        (0, 16, 4, 1),
        (1, 0, 8, 0),
    ]
    assert plan.lanes[0].window_bytes == 8


def test_bytescheduler_has_partitions_and_credit_as_given():
    plan = policies.get("bytescheduler", partition_bytes=16, credit_bytes=32).plan(profile_of((0, 40)), Network.line(2, 0, 1))
    assert [message.size_bytes for message in plan.messages] == [16, 16, 8]
    assert plan.lanes[0].window_bytes == 32


# -- blocks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("startup_ns", "rate", "expected"),
    [
        (2_000_000, 10**9, 10_000_000),  # ten startups of 2 ms cost what two blocks of 10 MB do at 1 GB/s
        (0, 10**9, 256 * 1024),
        (10**9, 10**9, 64 * MIB),
    ],
)
def test_blocks_are_so_large_that_the_two_under_way_take_as_long_as_all_startups(startup_ns, rate, expected):
    assert Blocks().block_bytes(100_000_000, Network.line(2, startup_ns, rate)) == expected


@given(startup_ns=st.integers(10**5, 10**7), rate=st.integers(10**7, 10**10), size_mb=st.integers(20, 2_000))
def test_no_other_size_of_block_costs_less_of_startups_and_waiting(startup_ns, rate, size_mb):
    model_bytes = size_mb * 10**6
    found = Blocks(least_bytes=8, most_bytes=2**40).block_bytes(model_bytes, Network.line(2, startup_ns, rate))

    def cost_s(block_bytes):
        return startup_ns / 1e9 * model_bytes / block_bytes + 2 * block_bytes / rate

    assert all(cost_s(found) <= cost_s(found * part) * (1 + 1e-6) for part in (0.1, 0.5, 0.9, 1.1, 2, 10))


def test_blocks_merge_what_is_small_and_cut_what_is_large_into_even_parts():
    blocks = policies.get("blocks", least_bytes=80, most_bytes=80)
    plan = blocks.plan(profile_of((0, 40), (1, 40), (2, 8), (3, 168), (4, 8)), Network.line(2, 0, 1))
    assert [[(s.tensor, s.size_bytes) for s in message.slices] for message in plan.messages] == [
        [(0, 40), (1, 40)],
        [(2, 8)],
        [(3, 56)],
        [(3, 56)],
        [(3, 56)],
        [(4, 8)],
    ]
    assert [message.priority for message in plan.messages] == [3, 2, 1, 1, 1, 0]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(profile=profiles(dtypes=("float32",), max_elements=2_000), network=networks())
def test_no_block_is_larger_than_the_target_and_no_two_neighbours_would_fit_one(profile, network):
    blocks = Blocks(least_bytes=64, most_bytes=4096)
    target = blocks.block_bytes(profile.size_bytes, network)
    plan = blocks.plan(profile, network)
    assert all(message.size_bytes <= target for message in plan.messages)
    for message in plan.messages:
        [*_, last] = message.slices
        of_tensor = profile.tensors[last.tensor].spec.size_bytes
        if of_tensor > target:
            # a part of a cut tensor is at least half a block, but for rounding at the last
            parts = -(-of_tensor // target)
            assert message.size_bytes >= of_tensor // parts - 8 * parts
    for before, after in zip(plan.messages, plan.messages[1:], strict=False):
        whole = all(p.size_bytes == profile.tensors[p.tensor].spec.size_bytes for m in (before, after) for p in m.slices)
        if whole:
            assert before.size_bytes + after.slices[0].size_bytes > target


@settings(max_examples=300, deadline=None)
@given(profile=profiles(max_tensors=24), network=networks() | st.just(Network.line(2, startup_ns=1, bytes_per_second=1)))
@example(  # its times need more than 64 bits
    profile=profile_of(*((each, 2**45) for each in range(6))), network=Network.line(2, startup_ns=1, bytes_per_second=1)
)
def test_the_exact_merge_is_its_recurrence_by_one_cost_a_time(profile, network):
    network, tensors = network.path, profile.tensors
    sent = [0]
    for seen in tensors:
        sent.append(sent[-1] + seen.spec.size_bytes)
    earliest, cuts, begins = [0], [0], 0
    for end, seen in enumerate(tensors, 1):
        if end > 1 and seen.spec.dtype != tensors[end - 2].spec.dtype:
            begins = end - 1
        ends = [
            (max(earliest[begin], seen.ready_ns) + network.cost_ns(sent[end] - sent[begin]), begin)
            for begin in range(begins, end)
        ]
        arrives, cut = min(ends)
        earliest.append(arrives)
        cuts.append(cut)
    expected, end = [], len(tensors)
    while end:
        expected.insert(0, list(range(cuts[end], end)))
        end = cuts[end]
    assert merge_exactly(profile, network) == expected
