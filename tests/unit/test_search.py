from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane import policies, zoo
from gradlane.core.network import Network
from gradlane.core.policy import KnobRange, tunable
from gradlane.core.profile import TensorSpec
from gradlane.errors import InputError
from gradlane.planning import search
from gradlane.planning.search import GaussianProcess, Grid, Momentum, Prior, Space
from gradlane.planning.search.gaussian import expected_improvement
from gradlane.sim import iteration_ns
from gradlane.testing.searches import bowl, tries_until_within

MODEL = (TensorSpec("small", 2**20), TensorSpec("large", 63 * 2**20))


# -- the space ----------------------------------------------------------------------------------------------


def test_a_space_is_logarithmic_and_its_ends_are_the_ranges():
    space = Space(
        policies.get("bytescheduler"), {"partition_bytes": KnobRange(2**10, 2**20), "credit_bytes": KnobRange(2**20, 2**20)}
    )
    assert space.knobs((0.0, 0.3)) == {"partition_bytes": 2**10, "credit_bytes": 2**20}
    assert space.knobs((0.5, 0.3)) == {"partition_bytes": 2**15, "credit_bytes": 2**20}
    assert space.knobs((1.0, 0.3)) == {"partition_bytes": 2**20, "credit_bytes": 2**20}
    assert space.point({"partition_bytes": 2**15, "credit_bytes": 2**20}) == (0.5, 0.0)
    assert space.point({"partition_bytes": 1, "credit_bytes": 2**30}) == (0.0, 0.0)
    assert space.start == {"partition_bytes": 2**20, "credit_bytes": 4 * 2**20}
    assert space.at((0.0, 0.0)) == policies.get("bytescheduler", partition_bytes=2**10, credit_bytes=2**20)


def test_sizes_that_make_no_difference_to_a_model_are_left_out():
    ranges = Space.of(policies.get("p3"), MODEL).ranges
    assert ranges == {"slice_bytes": KnobRange(64 * 2**10, 64 * 2**20)}
    many = (TensorSpec("huge", 2**30),)
    assert Space.of(policies.get("p3"), many).ranges == {"slice_bytes": KnobRange(2**19, 256 * 2**20)}


@pytest.mark.parametrize("name", [name for name in policies.names() if tunable(policies.get(name))])
@given(part=st.floats(0, 1))
def test_every_point_is_a_policy_and_where_its_sizes_say(name, part):
    space = Space.of(policies.get(name), MODEL)
    knobs = space.knobs((part,) * space.dimensions)
    for knob, (low, high, step) in space.ranges.items():
        assert (low - 64 if step is None else low - 1) < knobs[knob] <= high
        assert knobs[knob] % (step or 64) == 0
        assert getattr(space.at((part,) * space.dimensions), knob) == knobs[knob]
    assert space.point(knobs) == pytest.approx((part,) * space.dimensions, abs=0.026)  # half a step of 5 %


def test_which_policies_can_be_tuned_is_declared():
    assert {name: sorted(tunable(policies.get(name))) for name in policies.names() if tunable(policies.get(name))} == {
        "ddp": ["bucket_bytes"],
        "p3": ["slice_bytes"],
        "bytescheduler": ["credit_bytes", "partition_bytes"],
        "blocks": ["least_bytes"],
        "prophet": ["partition_bytes"],
        "geryon": ["slice_bytes", "threshold_percent"],
        "owners": ["most_bytes"],
    }
    with pytest.raises(InputError, match="policy wfbp: it declares no knobs to tune"):
        Space.of(policies.get("wfbp"), MODEL)
    with pytest.raises(InputError, match="most_bytes: got 1000000"):
        Space.of(policies.get("blocks", most_bytes=1_000_000), MODEL)


# -- the searches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in search.NAMES if name != "grid"])
def test_another_seed_gives_other_trials(name):
    def trials(seed):
        one = search.start(name, 2, seed)
        found = []
        for _ in range(8):
            found.append(one.ask())
            one.tell(found[-1], bowl(found[-1]))
        return found

    assert trials(3) != trials(4)


@pytest.mark.slow
def test_the_gaussian_process_needs_fewer_trials_than_the_others():
    def tries(name):
        return sorted(tries_until_within(search.start(name, 2, seed), bowl, 0.03, noise=0.01, seed=seed) for seed in range(5))[
            2
        ]

    needed = {name: tries(name) for name in search.NAMES}
    assert needed["gaussian-process"] <= 12
    assert all(needed[other] > needed["gaussian-process"] for other in ("random", "grid", "momentum"))


def test_a_prior_that_is_right_in_shape_and_wrong_by_half_in_level_finds_it_at_once():
    side = np.linspace(0, 1, 11)
    logs = np.array([[math.log(bowl((x, y)) / 2) for y in side] for x in side])
    assert tries_until_within(GaussianProcess(2, 0, Prior(logs)), bowl, 0.03) == 1


@pytest.mark.slow
def test_a_prior_that_is_wrong_is_overruled():
    side = np.linspace(0, 1, 11)
    mirrored = np.array([[math.log(bowl((1 - x, 1 - y))) for y in side] for x in side])
    for seed in range(3):
        assert tries_until_within(GaussianProcess(2, seed, Prior(mirrored)), bowl, 0.03, noise=0.01, seed=seed) <= 25


def test_what_the_prior_expects_to_be_twice_as_slow_is_never_tried():
    cliff = Prior(np.log(np.array([[1.0, 10.0], [10.0, 10.0]])))
    one = GaussianProcess(2, 0, cliff)
    for _ in range(10):
        point = one.ask()
        assert cliff(np.array([point]))[0] <= math.log(2.0) + 1e-9
        one.tell(point, 5.0)


def test_one_absurd_measurement_does_not_lead_the_search_astray():
    one = GaussianProcess(2, 1)
    one.tell((0.7, 0.2), 100 * 50)  # where the best is, as if a checkpoint had been written meanwhile
    assert tries_until_within(one, bowl, 0.06, noise=0.01) <= 25


def test_a_prior_is_linear_between_its_points_and_exact_on_them():
    prior = Prior(np.array([[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]))
    points = np.array([[0.0, 0.0], [1.0, 1.0], [0.5, 0.25], [0.0, 0.75]])
    assert prior(points) == pytest.approx([0.0, 12.0, 5.5, 1.5])


def test_the_simulator_as_prior_is_what_the_simulator_says():
    profile, network = zoo.profile("alexnet", device="v100", batch=32), Network.line(8, 200_000, 10**9)
    space = Space.of(policies.get("p3"), profile.specs)

    def judge(policy):
        return iteration_ns(policy.plan(profile, network), profile, network)

    prior = search.predicted(space, judge, steps=5)
    for index in range(5):
        assert math.exp(prior.logs[index]) == pytest.approx(judge(space.at((index / 4,))))


def test_expected_improvement_is_the_mean_of_what_lies_below():
    draws = np.random.default_rng(0).normal(3.0, 2.0, 400_000)
    brute = np.maximum(2.5 - draws, 0).mean()
    assert expected_improvement(np.array([3.0]), np.array([2.0]), 2.5)[0] == pytest.approx(brute, rel=0.01)
    assert expected_improvement(np.array([1.0, 4.0]), np.array([0.0, 0.0]), 2.5) == pytest.approx([1.5, 0.0])


def test_the_grid_is_every_point_in_order_and_then_the_first_again():
    grid = Grid.regular(2, steps=2)
    seen = []
    for _ in range(5):
        seen.append(grid.ask())
        grid.tell(grid.ask(), 1.0)
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)]


def test_momentum_descends_and_begins_anew_where_nothing_gets_better():
    steep = Momentum(1, seed=0, patience=10**6)
    for _ in range(60):
        steep.tell(steep.ask(), math.exp((steep.ask()[0] - 0.5) ** 2 * 4))
    assert steep.ask()[0] == pytest.approx(0.5, abs=0.12)

    flat = Momentum(1, seed=0, patience=2)
    centres = []
    for _ in range(12):
        centres.append(flat.ask()[0])
        flat.tell(flat.ask(), 1.0)
    assert len({round(centre, 6) for centre in centres[::2]}) > 1


@settings(max_examples=15, deadline=None)
@given(dimensions=st.integers(1, 3), seed=st.integers(0, 9), values=st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=4))
def test_a_gaussian_process_takes_whatever_is_measured(dimensions, seed, values):
    one = GaussianProcess(dimensions, seed)
    for value in values:
        one.tell(one.ask(), value)
    assert len(one.ask()) == dimensions
    assert all(0 <= part <= 1 for part in one.ask())


def test_a_search_that_does_not_exist_is_refused_with_what_does():
    with pytest.raises(InputError, match="search: got 'best', expected one of gaussian-process, random, grid, momentum"):
        search.start("best", 2, 0)


def test_without_scikit_learn_the_error_says_what_to_install():
    program = """
import sys
sys.modules["sklearn"] = None
from gradlane.planning import search
print(search.start("random", 2, 0).ask() is not None)
try:
    search.start("gaussian-process", 2, 0)
except Exception as error:
    print(type(error).__name__, "pip install 'gradlane[tune]'" in str(error))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\nUnsupportedError True\n"


def test_points_of_a_grid_cover_the_corners():
    grid = Grid.regular(2, steps=8)
    points = []
    for _ in range(64):
        points.append(grid.ask())
        grid.tell(grid.ask(), 1.0)
    assert set(itertools.product((0.0, 1.0), repeat=2)) <= set(points)
    assert len(set(points)) == 64
