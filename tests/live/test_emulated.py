"""Emulated devices on a clock that tests turn, so that moments are exact; and under DDP and gradlane on real ranks."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from msgspec import structs

from gradlane.core.profile import Profile
from gradlane.emulation.device import Device, ThreadClock
from gradlane.emulation.model import coefficient
from gradlane.errors import InputError
from gradlane.lab import emulated
from gradlane.testing.generators import profile_of
from tests.live import emulation
from tests.live.ranks import Ranks


class TurnedClock:
    """Time passes when somebody sleeps, computes or is blocked, and only then."""

    def __init__(self) -> None:
        self._now_ns, self._busy_ns = 1_000_000, 0

    def now_ns(self) -> int:
        return self._now_ns

    def busy_ns(self) -> int:
        return self._busy_ns

    def sleep_until(self, due_ns: int) -> None:
        self._now_ns = max(self._now_ns, due_ns)

    def compute(self, time_ns: int) -> None:
        self._now_ns += time_ns
        self._busy_ns += time_ns

    def block(self, time_ns: int) -> None:
        self._now_ns += time_ns


def emulated_profile(
    rows: list[tuple[str, int, int, int]], forward_ns: list[int], backward_ns: int, update_ns: int = 0
) -> Profile:
    """rows: name, elements, ready_ns, layer."""
    names, elements, ready_ns, layers = zip(*rows, strict=True)
    tensors = zip(ready_ns, (4 * size for size in elements), strict=True)
    return profile_of(*tensors, names=names, layers=layers, forward_ns=forward_ns, update_ns=update_ns, backward_ns=backward_ns)


SMALL = emulated_profile(
    [("c.bias", 2, 5_000, 2), ("c.weight", 6, 5_000, 2), ("b", 4, 9_000, 1), ("a.inner.weight", 8, 20_000, 0)],
    [3_000, 4_000, 5_000],
    21_000,
    update_ns=700,
)


def watched(model: torch.nn.Module, clock: TurnedClock) -> list[tuple[str, int]]:
    """Fills with the name of each gradient and the moment at which its hook ran."""
    seen: list[tuple[str, int]] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: seen.append((name, clock.now_ns())))
    return seen


def test_parameters_have_the_profiles_names_and_sizes_in_the_order_of_use() -> None:
    model = emulated(SMALL)
    # torch lists a module's own parameters before those of the modules in it
    assert [(name, param.numel()) for name, param in model.named_parameters()] == [
        ("b", 4), ("a.inner.weight", 8), ("c.weight", 6), ("c.bias", 2),
    ]  # fmt: skip


def test_gradients_are_ready_in_the_profiles_order_at_its_moments() -> None:
    clock = TurnedClock()
    model = emulated(SMALL, clock=clock)
    seen = watched(model, clock)
    for _ in range(3):
        began = clock.now_ns()
        loss = model()
        assert clock.now_ns() - began == 12_000
        began = clock.now_ns()
        loss.backward()
        assert clock.now_ns() - began == 21_000
        assert [(name, at - began) for name, at in seen] == [
            ("c.bias", 5_000), ("c.weight", 5_000), ("b", 9_000), ("a.inner.weight", 20_000),
        ]  # fmt: skip
        seen.clear()


def test_readiness_that_is_not_the_reverse_of_use_is_kept() -> None:
    rows = [(f"tensor{index}", 1, 1_000 * (index + 1), layer) for index, layer in enumerate((2, 0, 3, 1, 0, 2))]
    clock = TurnedClock()
    model = emulated(emulated_profile(rows, [10, 20, 30, 40], 7_000), clock=clock)
    seen = watched(model, clock)
    model().backward()
    assert [(name, at - 1_000_000 - 100) for name, at in seen] == [(f"tensor{i}", 1_000 * (i + 1)) for i in range(6)]


def test_waiting_shifts_the_schedule_and_computing_does_not() -> None:
    clock = TurnedClock()
    model = emulated(SMALL, clock=clock)
    seen = watched(model, clock)
    params = dict(model.named_parameters())
    params["c.bias"].register_post_accumulate_grad_hook(lambda _: clock.compute(3_500))
    params["b"].register_post_accumulate_grad_hook(lambda _: clock.block(6_000))
    loss = model()
    began = clock.now_ns()
    loss.backward()
    # 3.5 of computing do not outlast the 4 until b; the 6 of waiting are added to all that follows
    assert [(name, at - began) for name, at in seen] == [
        ("c.bias", 5_000), ("c.weight", 8_500), ("b", 9_000), ("a.inner.weight", 26_000),
    ]  # fmt: skip
    assert clock.now_ns() - began == 27_000


@pytest.mark.parametrize("waited_ns", [1_000_000, 60_000_000])
def test_no_layer_runs_before_the_sum_is_there_that_it_waits_for(waited_ns: int) -> None:
    """The script computes between the passes; then the pass waits for a sum, or for a lock, as a host may that runs ahead."""
    clock = TurnedClock()
    model = emulated(SMALL, clock=clock)
    model().backward()
    first = dict(model.named_parameters())["a.inner.weight"]
    began = clock.now_ns()
    clock.compute(40_000_000)
    first.detach = lambda: clock.block(waited_ns)  # as a parameter with a pending update waits
    model()
    there = began + 40_000_000 + waited_ns
    assert clock.now_ns() == (there + 12_000 if waited_ns > 2_000_000 else there)


def test_what_a_pass_could_not_make_up_for_is_not_owed_by_the_next() -> None:
    clock = TurnedClock()
    device = Device(clock)
    device.run(1_000)
    clock.compute(50_000_000)
    device.run(10_000_000)
    device.end_pass()
    began = clock.now_ns()
    assert began == 1_000_000 + 1_000 + 50_000_000
    device.run(7_000)
    assert clock.now_ns() == began + 7_000


def test_an_update_takes_its_time_in_the_next_forward_pass_and_only_once() -> None:
    clock = TurnedClock()
    model = emulated(SMALL, clock=clock)
    optimizer = torch.optim.SGD([param for name, param in model.named_parameters() if name != "b"], lr=0.1)
    model().backward()
    optimizer.step()
    forward = []
    for _ in range(2):
        began = clock.now_ns()
        model()
        forward.append(clock.now_ns() - began)
    assert forward == [12_000 + 2 * 700, 12_000]


def test_uncovered_time_comes_before_a_forward_pass_that_trains() -> None:
    clock = TurnedClock()
    model = emulated(structs.replace(SMALL, uncovered_ns=50_000), clock=clock)
    for trains, expected_ns in ((True, 50_000 + 12_000), (False, 12_000)):
        before_ns = clock.now_ns()
        with torch.set_grad_enabled(trains):
            model()
        assert clock.now_ns() - before_ns == expected_ns


def test_gradients_are_those_of_their_rank_iteration_and_tensor_and_scale_with_the_loss() -> None:
    model = emulated(SMALL, rank=3, clock=TurnedClock())
    params = [dict(model.named_parameters())[tensor.spec.name] for tensor in SMALL.tensors]
    for iteration, weight in enumerate((1.0, 0.5, 4.0)):
        model.zero_grad()
        (weight * model()).backward()
        for tensor, param in enumerate(params):
            assert param.grad.unique().tolist() == [weight * coefficient(3, iteration, tensor)]
    values = {coefficient(rank, iteration, 5) for rank in range(8) for iteration in range(4)}
    assert len(values) > 20


def test_gradients_accumulate_until_they_are_dropped() -> None:
    model = emulated(SMALL, rank=0, clock=TurnedClock())
    for _ in range(3):
        model().backward()
    for tensor, spec in enumerate(SMALL.specs):
        expected = sum(coefficient(0, iteration, tensor) for iteration in range(3))
        assert dict(model.named_parameters())[spec.name].grad.unique().tolist() == [expected]


def test_a_scaled_profile_has_the_same_times_and_a_tenth_of_the_bytes() -> None:
    draw = random.Random(1)
    rows = [(f"tensor{index}", draw.randint(1, 10_000), index, 0) for index in range(50)]
    profile = emulated_profile(rows, [9], 60)
    model = emulated(profile, scale=0.1)
    assert model.profile.size_bytes == sum(4 * max(1, round(size / 10)) for _, size, _, _ in rows)
    assert [tensor.ready_ns for tensor in model.profile.tensors] == list(range(50))
    assert model.profile.layers == profile.layers
    assert "sizes x 0.1: true on links of 0.1 of the rate" in repr(model)
    assert model.profile.source.startswith("sizes x 0.1; ")


def test_the_lab_tells_the_scale_and_how_slow_this_host_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADLANE_LAB_SCALE", "0.5")
    monkeypatch.setenv("GRADLANE_LAB_COMPUTE_PERCENT", "150")
    clock = TurnedClock()
    model = emulated(SMALL, clock=clock)
    began = clock.now_ns()
    model().backward()
    assert clock.now_ns() - began == 33_000 * 3 // 2
    assert model.profile.size_bytes == 40
    monkeypatch.setenv("GRADLANE_LAB_SCALE", "half")
    with pytest.raises(InputError, match="GRADLANE_LAB_SCALE: got 'half', expected a number above 0"):
        emulated(SMALL)


@pytest.mark.parametrize("name", ["a..b", "training", "weight.weight"])
def test_names_that_torch_cannot_have_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="tensor name: got"):
        emulated(emulated_profile([(name, 1, 1, 0), ("weight", 1, 2, 0)], [1], 3))


def test_a_copy_of_a_model_is_one_of_its_own() -> None:
    model = emulated(SMALL, rank=0)
    model().backward()
    other = copy.deepcopy(model)
    other().backward()
    gradients = [[float(param.grad[0]) for param in each.parameters()] for each in (model, other)]
    places = [[spec.name for spec in SMALL.specs].index(name) for name, _ in model.named_parameters()]
    assert gradients[0] == [coefficient(0, 0, tensor) for tensor in places]
    # torch copies a parameter without its gradient
    assert gradients[1] == [coefficient(0, 1, tensor) for tensor in places]


@pytest.mark.timing
def test_the_real_clock_tells_waiting_from_computing() -> None:
    clock = ThreadClock()
    clock.sleep_until(clock.now_ns() + 1)
    began, busy = clock.now_ns(), clock.busy_ns()
    clock.sleep_until(began + 50_000_000)
    slept, busy_asleep = clock.now_ns() - began, clock.busy_ns() - busy
    assert slept >= 50_000_000
    assert slept - busy_asleep > 25_000_000
    busy = clock.busy_ns()
    while clock.now_ns() < began + 100_000_000:
        pass
    assert clock.busy_ns() - busy > 0


@pytest.mark.timing
def test_real_steps_take_at_least_the_profiles_time() -> None:
    profile = emulated_profile([("b", 10, 2_000_000, 1), ("a", 10, 10_000_000, 0)], [5_000_000, 5_000_000], 10_000_000)
    model = emulated(profile, rank=0)
    clock = ThreadClock()
    began = clock.now_ns()
    for _ in range(5):
        model().backward()
    assert 5 * 20_000_000 <= clock.now_ns() - began < 5_000_000_000


def test_under_gradlane_and_ddp_two_ranks_learn_the_same_bits() -> None:
    ranks = Ranks(2)
    try:
        for parameters, expected in ranks.run("tests.live.emulation:train_both"):
            for name, values in parameters.items():
                assert values == (expected[name], expected[name]), name
        assert ranks.run("tests.live.emulation:order_of_readiness") == [list(emulation.NAMES)] * 2
    finally:
        ranks.close()
