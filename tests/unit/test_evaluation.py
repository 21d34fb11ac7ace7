"""What `gradlane compare` says of recorded times: no ratio stands beside a bound that contradicts it without a line that says
why.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from rich.console import Console

from gradlane.compare.arms import ALONE, BASELINE
from gradlane.compare.evaluation import answer, evaluate, trial_remarks
from gradlane.compare.records import Cell, Comparison, Sweep
from gradlane.core.records.speedup import Speedup, turn_times
from gradlane.report.sweep import render_sweep
from gradlane.report.table import render

MS = 10**6
DISTURBED = "x DDP is of steps in the same turns, rely on it and not on ratios of step ms"


def comparison(
    *, wire: Sequence[float] = (300,) * 5, hosts: int = 2, steps: int = 2, **turns_ms: Sequence[float]
) -> Comparison:
    """Of turns in ms; `ddp` and `alone` are the two arms that each run has."""
    named = {BASELINE: turns_ms.pop("ddp"), ALONE: turns_ms.pop("alone"), **turns_ms}
    arms = {
        name: {"step_ns": [round(each * MS) for each in turns for _ in range(steps)], "loss": 0.5, "equal_to_ddp": True}
        for name, turns in named.items()
    }
    outcome = {"model": "net", "parameter_bytes": 2**20, "turns": len(wire), "arms": arms, "loss_step": 9}
    outcome["all_reduce_ns"] = [round(each * MS) for each in wire for _ in range(steps)]
    return evaluate(outcome, command="c", machine="m", hosts=hosts, link_bits_per_second=None)


def ratios(found: Comparison) -> dict[str, float]:
    return {each.policy: each.speedup.ratio for each in found.results if each.speedup is not None}


def test_what_a_host_sent_stands_beside_what_it_has_to():
    assert sent(hosts=4, ranks_per_host=2, card_bytes=6 * 2**20) == "torch-ddp 2.00"
    # one host has nothing to send, and outside of a lab nothing is counted
    assert sent(hosts=1, ranks_per_host=2, card_bytes=6 * 2**20) is None
    assert sent(hosts=4, ranks_per_host=2, card_bytes=None) is None


def sent(*, hosts: int, ranks_per_host: int, card_bytes: int | None) -> str | None:
    """What the remark on cards says of torch DDP, with gradients of 2 MiB; None without one."""
    arms = {name: {"step_ns": [MS], "loss": 0.5, "equal_to_ddp": True} for name in (BASELINE, ALONE)}
    arms[BASELINE]["card_bytes"] = card_bytes
    outcome = {"model": "net", "parameter_bytes": 2**21, "turns": 1, "arms": arms, "all_reduce_ns": [MS], "loss_step": 9}
    where = {"hosts": hosts, "ranks_per_host": ranks_per_host, "link_bits_per_second": None}
    lines = evaluate(outcome, command="c", machine="m", **where).remarks
    return next((line.rpartition(": ")[2] for line in lines if line.startswith("sent by rank 0's host")), None)


@pytest.mark.parametrize(
    ("ratios", "arm", "number"),
    [
        ({BASELINE: 1.0, "wfbp": 1.1, "blocks": 1.3}, "blocks", "1.30x"),
        ({BASELINE: 1.0, "auto@server": 1.2, "blocks": 1.3}, "auto@server", "1.20x"),
        ({BASELINE: 1.0, "wfbp": 0.9}, "wfbp", "0.90x"),
        ({BASELINE: 1.0, "wfbp": None}, None, "-"),
    ],
)
def test_the_answer_is_about_auto_or_the_fastest_and_names_it(ratios, arm, number):
    found = answer({name: ratio and Speedup(ratio, ratio, ratio, 3) for name, ratio in ratios.items()}, 1.5)
    assert (found.arm, found.number) == (arm, number)
    assert arm is None or f"With {arm}, training is {number[:-1]} times as fast" in found.sentence


def test_a_steady_run_has_no_remark():
    found = comparison(ddp=[600] * 5, alone=[300] * 5, wire=[310] * 5, p3=[400] * 5)
    assert ratios(found) == {BASELINE: 1.0, "p3": 1.5}
    assert found.bound == Speedup(600 / 310, 600 / 310, 600 / 310, 5)
    assert [each.hidden for each in found.results] == [pytest.approx(1 - 300 / 310), pytest.approx(1 - 100 / 310)]
    assert not found.remarks


def test_a_step_that_takes_longer_than_computing_and_summing_hides_nothing_that_is_known():
    found = comparison(ddp=[600] * 5, alone=[200] * 5, wire=[310] * 5, p3=[510] * 5)
    assert [each.hidden for each in found.results] == [None, 0.0]


def test_disturbed_turns_of_ddp_raise_the_bound_as_much_as_the_ratios_and_are_told():
    found = comparison(ddp=[600, 2000, 600, 3000, 2500], alone=[300] * 5, p3=[400] * 5)
    assert ratios(found)["p3"] == 5.0
    assert found.bound is not None
    assert found.bound.ratio == pytest.approx(20 / 3)
    assert not any(each.beats_bound for each in found.results)
    assert found.remarks == (f"torch-ddp was disturbed: 5 turns took 600.00 ms to 3.00 s a step; {DISTURBED}",)


def test_a_turn_of_ddp_that_took_a_hundred_times_as_long_changes_no_ratio_and_is_told():
    found = comparison(ddp=[600, 60_000, 600, 600, 600], alone=[300] * 5, p3=[400] * 5)
    assert ratios(found)["p3"] == 1.5
    assert found.bound is not None
    assert found.bound.ratio == 2.0
    assert found.remarks == (f"torch-ddp was disturbed: 5 turns took 600.00 ms to 60.00 s a step; {DISTURBED}",)


def test_medians_that_have_another_ratio_than_the_turns_are_told_where_no_turn_of_ddp_shows_it():
    found = comparison(ddp=[600, 600, 600, 700, 700], alone=[300] * 5, p3=[400, 400, 466, 466, 466])
    assert ratios(found)["p3"] == pytest.approx(1.5, rel=0.01)
    assert found.remarks == (
        f"torch-ddp was disturbed in some turns, or p3: medians have another ratio than turns; {DISTURBED}",
    )


@pytest.mark.parametrize(
    ("turns", "remark"),
    [
        (
            {"alone": [420, 430, 300, 425, 410]},
            "! p3 is above the bound: in 4 of 5 turns its steps were shorter than computing alone: computing times differed",
        ),
        (
            {"alone": [300] * 5, "wire": [420] * 5},
            "! p3 is above the bound: in 5 of 5 turns its steps were shorter than one all-reduce of all gradients: "
            "the network's rate differed",
        ),
        (
            {"alone": [401, 405, 395, 403, 390]},
            "! p3 is above the bound by less than turns differ: 1.50..1.50, bound 1.49..1.52",
        ),
    ],
)
def test_a_ratio_above_the_bound_of_its_own_turns_is_marked_and_told_why(turns, remark):
    found = comparison(ddp=[600] * 5, p3=[400] * 5, **turns)
    assert found.bound is not None
    assert ratios(found)["p3"] > found.bound.ratio
    assert [each.policy for each in found.results if each.beats_bound] == ["p3"]
    assert remark in found.remarks
    text = io.StringIO()
    render(found, Console(width=200, file=text))
    assert "1.50 !*" in text.getvalue()
    assert remark in text.getvalue()
    body = json.loads(found.to_json())["body"]
    assert body["results"][1]["speedup"] == {"ratio": 1.5, "low": 1.5, "high": 1.5, "turns": 5}
    assert remark in body["remarks"]


TIMES = st.lists(st.tuples(*[st.floats(1, 10**5)] * 5), min_size=1, max_size=7)


@given(TIMES)
def test_whatever_was_measured_a_ratio_above_the_bound_has_its_mark_and_its_line(turns):
    ddp, alone, wire, p3, dear = zip(*turns, strict=True)
    found = comparison(ddp=ddp, alone=alone, wire=wire, p3=p3, dear=dear)
    assert found.bound is not None
    for result in found.results:
        assert result.speedup is not None
        above = result.speedup.ratio > found.bound.ratio
        assert result.beats_bound == above
        assert above == any(line.startswith(f"! {result.policy} is above the bound") for line in found.remarks)
        assert "in 0 of" not in "".join(found.remarks)


def cell(arm: str, steps_ms: Sequence[float], ddp_ms: Sequence[float]) -> Cell:
    steps = [tuple(round(each * MS) for each in times) for times in (ddp_ms, steps_ms)]
    speedup = Speedup.of(*(turn_times(each, len(each)) for each in steps))
    return Cell("vgg16", 2, 0, 10**9, 0.1, arm, steps[1], 300 * MS, 350 * MS, 310 * MS, turns=len(steps_ms), speedup=speedup)


def test_a_sweep_marks_what_is_below_the_simulated_bound_and_tells_of_disturbed_turns():
    ddp = [600, 900, 600]
    cells = (cell(BASELINE, ddp, ddp), cell("p3", [305, 320, 308], ddp), cell("wfbp", [400, 600, 400], ddp))
    lines = trial_remarks(cells)
    assert lines == [
        "! p3 is 0.6% below the bound, in 2 of 3 turns: the bound is simulated from computing alone and the network as the run "
        "measured them, and one was too slow",
        f"torch-ddp was disturbed: 3 turns took 600.00 ms to 900.00 ms a step; {DISTURBED}",
    ]
    text = io.StringIO()
    render_sweep(Sweep("c", "m", cells), Console(width=300, file=text))
    assert "vgg16, 2 hosts, 1 Gbit/s links" in text.getvalue()
    assert "1.97 !*" in text.getvalue()
    assert all(line in text.getvalue() for line in lines)
    assert "1.50  1.50..1.50" in text.getvalue()


def test_two_profiles_of_one_name_are_two_trials_that_are_told_apart():
    arms = (cell(BASELINE, [600], [600]), cell("p3", [500], [600]))
    sweep = Sweep("c", "m", tuple(structs.replace(arm, folder=folder) for folder in ("vgg16-a", "vgg16-b") for arm in arms))
    assert [[arm.folder for arm in trial] for trial in sweep.trials] == [["vgg16-a"] * 2, ["vgg16-b"] * 2]
    text = io.StringIO()
    render_sweep(sweep, Console(width=300, file=text))
    assert all(f"vgg16 ({folder}), 2 hosts" in text.getvalue() for folder in ("vgg16-a", "vgg16-b"))
    assert "in 2 of 2 trials" in text.getvalue()
