"""How far from linear published jobs were, and what the planner says of them: experiments/notes/planner.md has the table."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from tests.commands import ROOT, invoke

RUNS = json.loads((Path(__file__).parent / "published_scaling.json").read_text())


def percent_of_linear(run: dict, *more: str) -> float:
    (case,) = json.loads(invoke("simulate", *run["command"].split(), "--policy", "ddp", "--json", *more))["rows"]
    return 100 * case["efficiency"]


@pytest.fixture(scope="module")
def found() -> list[tuple[float, float]]:
    return [(percent_of_linear(run), percent_of_linear(run, "--jitter", "5%")) for run in RUNS]


def test_the_table_of_the_notes_has_what_the_planner_says(found):
    page = (ROOT / "experiments" / "notes" / "planner.md").read_text()
    for run, (alike, scattered) in zip(RUNS, found, strict=True):
        assert f"| {run['name']} | {run['published']:.0f} % | {alike:.0f} % | {scattered:.0f} % |\n" in page


def test_devices_that_are_all_alike_scale_better_than_what_was_published(found):
    errors = [alike - run["published"] for run, (alike, _) in zip(RUNS, found, strict=True)]
    assert all(0 < error < 31 for error in errors)
    assert 10 < median(errors) < 12


def test_with_scatter_the_planner_is_nearer_to_what_was_published(found):
    errors = [scattered - run["published"] for run, (_, scattered) in zip(RUNS, found, strict=True)]
    assert all(-6 < error < 22 for error in errors)
    assert median(map(abs, errors)) < 7
