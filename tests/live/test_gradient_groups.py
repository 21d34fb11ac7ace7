"""Groups of gradients: every gradient is handled once, together with neighbours or by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradlane.core.plan import Message, Plan, Slice
from gradlane.core.profile import TensorSpec
from gradlane.live.session.gradient_groups import GradientGroups

KIB = 1024


def plan_of(specs: list[TensorSpec]) -> Plan:
    messages = tuple(Message((Slice(index, 0, spec.size_bytes),)) for index, spec in enumerate(specs))
    return Plan("by-hand", "many", tuple(specs), messages)


def groups(
    sizes_kib: list[int], ready_us: list[int], dtypes: list[str] | None = None, slots: list[str] | None = None
) -> GradientGroups:
    dtypes = dtypes or ["float32"] * len(sizes_kib)
    specs = [
        TensorSpec(f"t{index}", size * KIB, dtype) for index, (size, dtype) in enumerate(zip(sizes_kib, dtypes, strict=True))
    ]
    return GradientGroups(plan_of(specs), slots or dtypes, {f"t{index}": at * 1000 for index, at in enumerate(ready_us)})


def test_neighbours_that_are_ready_within_300_us_are_a_group():
    assert groups([1, 1, 1, 1], [0, 200, 300, 301]).members == [[0, 1, 2], [3]]


def test_a_group_has_at_most_64_kib():
    assert groups([32, 32, 1, 100, 1, 1], [0, 0, 0, 0, 0, 0]).members == [[0, 1], [2], [3], [4, 5]]


def test_a_group_has_one_dtype_since_its_slots_are_one_range_of_one_buffer():
    assert groups([1, 1, 1], [0, 0, 0], ["float32", "float16", "float16"]).members == [[0], [1, 2]]


def test_slots_of_two_dtypes_are_two_groups_though_they_travel_in_one():
    assert groups([1, 1, 1], [0, 0, 0], ["bfloat16"] * 3, slots=["float32", "bfloat16", "bfloat16"]).members == [[0], [1, 2]]


def test_without_a_profile_each_gradient_is_by_itself():
    plan = plan_of([TensorSpec("a", 4), TensorSpec("b", 4)])
    assert GradientGroups(plan, ["float32", "float32"], None).members == [[0], [1]]


def test_a_group_that_had_to_wait_for_the_end_of_a_pass_is_dissolved_for_good():
    found = groups([1, 1, 1, 1], [0, 0, 400, 400])
    assert [list(found.add(tensor)) for tensor in (0, 2, 3)] == [[], [], [2, 3]]  # 1 got no gradient
    found.dissolve([1])
    for _ in range(2):
        found.begin()
        assert [list(found.add(tensor)) for tensor in (1, 0, 3, 2)] == [[1], [0], [], [2, 3]]


@given(st.data())
def test_every_gradient_is_handled_once_in_every_pass_whatever_the_order(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    sizes = data.draw(st.lists(st.sampled_from([1, 20, 64, 200]), min_size=count, max_size=count))
    ready = sorted(data.draw(st.lists(st.integers(0, 1500), min_size=count, max_size=count)))
    found = groups(sizes, ready)
    for _ in range(3):
        found.begin()
        absent = data.draw(st.sets(st.integers(0, count - 1)))
        order = [tensor for tensor in data.draw(st.permutations(range(count))) if tensor not in absent]
        handled = [tensor for given_now in order for tensor in found.add(given_now)]
        assert len(handled) == len(set(handled))
        left = set(order) - set(handled)
        spoilt = {tensor for group in found.members if absent.intersection(group) for tensor in group}
        assert left == spoilt - absent  # those wait for the end of the pass
        found.dissolve(sorted(absent))
        assert sorted(tensor for group in found.members for tensor in group) == list(range(count))
