from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments import bytescheduler, geryon, mg_wfbp, prophet, searches
from experiments.assumptions import k80_cluster
from experiments.table import Row, difference, page
from gradlane.tune.search import GaussianProcess, Grid, Prior

NO_DATA = Path("nowhere")


def test_the_k80_cluster_of_16_costs_what_was_fitted():
    network = k80_cluster("ring", 16)
    assert network.startup_ns == pytest.approx(972_000, rel=1e-4)
    assert 1 / network.bytes_per_second == pytest.approx(1.97e-9, rel=1e-4)


def test_differences_are_relative_or_in_points():
    assert difference(Row("f", "w", 2.0, 3.0, "x")) == "+50%"
    assert difference(Row("f", "w", 40.0, 44.4, "%")) == "+4.4 points"
    assert (difference(Row("f", "w", "yes", "yes")), difference(Row("f", "w", "yes", "no"))) == ("same", "other")
    assert difference(Row("f", "w", None, 3.0)) == ""
    assert "| f | w | plot | 3 x |  |" in page([("T", "remarks", [Row("f", "w", None, 3.0, "x")])])


def test_what_the_simulator_reproduces_it_goes_on_reproducing():
    assert bytescheduler._figure_2().ours == pytest.approx(44.4, abs=0.05)
    assert geryon._order_is_worth() == pytest.approx(1.31, abs=0.03)
    assert geryon.collision() == pytest.approx(0.5, abs=0.01)
    rows = {(row.figure, row.what): row for row in mg_wfbp.rows(NO_DATA)}
    for model in ("googlenet", "resnet50"):
        assert rows["Fig. 10", f"{model}: WFBP falls behind SyncEASGD between 16 and 64 workers"].ours == "yes"


def test_prophets_policies_are_level_at_ten_gigabits():
    at_ten = [row.ours for row in prophet.rows(NO_DATA) if row.what.startswith("10 Gbit/s")]
    assert len(at_ten) == 3
    assert max(at_ten) == pytest.approx(min(at_ten), rel=0.01)


def test_a_search_is_done_when_it_tries_what_is_within_two_per_cent_of_the_best():
    slope = Prior(np.log(np.array([2.0, 1.5, 1.01, 1.0])))  # its third of four points is within a hundredth
    assert searches.trials(Grid.regular(1, steps=4), slope, seed=0) == 3
    assert searches.trials(Grid.regular(1, steps=2), slope, seed=0) == 2
    assert searches.trials(GaussianProcess(1, 0, slope), slope, seed=0) == 1
    never = Grid(iter([(0.0,)] * 1000))
    assert searches.trials(never, slope, seed=0) == searches.AT_MOST
