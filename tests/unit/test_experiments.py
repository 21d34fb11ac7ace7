from __future__ import annotations

from pathlib import Path

import pytest

from experiments import bytescheduler, geryon, mg_wfbp, prophet
from experiments.assumptions import k80_cluster
from experiments.table import Row, difference, page

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
    assert geryon._collision() == pytest.approx(0.5, abs=0.01)
    rows = {(row.figure, row.what): row for row in mg_wfbp.rows(NO_DATA)}
    for model in ("googlenet", "resnet50"):
        assert rows["Fig. 10", f"{model}: WFBP falls behind SyncEASGD between 16 and 64 workers"].ours == "yes"


def test_prophets_policies_are_level_at_ten_gigabits():
    at_ten = [row.ours for row in prophet.rows(NO_DATA) if row.what.startswith("10 Gbit/s")]
    assert len(at_ten) == 3
    assert max(at_ten) == pytest.approx(min(at_ten), rel=0.01)
