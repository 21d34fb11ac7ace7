"""Where a prediction goes wrong is found from two timelines, and the page says what the cells say."""

from __future__ import annotations

import msgspec
import pytest

from experiments.fidelity.anatomy import Gap, dissect
from experiments.fidelity.page import page
from experiments.fidelity.results import Results, TrialResult, read, spread, write
from gradlane import policies
from gradlane.compare.records import Cell
from gradlane.core.network import Network
from gradlane.core.timeline import Timeline
from gradlane.sim import simulate
from gradlane.testing.generators import chain

PROFILE = chain((1_000, 400, 10, 500), (500, 4_000, 10, 500))
NETWORK = Network.line(2, 50, 10**9)
PLAN = policies.get("wfbp").plan(PROFILE, NETWORK)


def later(timeline, kind, subject, start_ns, end_ns):
    """The same with the spans of one kind and subject moved."""
    spans = (
        msgspec.structs.replace(span, start_ns=span.start_ns + start_ns, end_ns=span.end_ns + end_ns)
        if (span.kind, span.subject) == (kind, subject)
        else span
        for span in timeline.spans
    )
    return Timeline(timeline.plan, 1, tuple(spans))


def test_a_run_that_does_what_was_simulated_has_no_gap():
    simulated = simulate(PLAN, PROFILE, NETWORK)
    assert dissect(PLAN, simulated, simulated) == dissect(PLAN, later(simulated, "send", 0, 0, 0), simulated)
    seen = dissect(PLAN, simulated, simulated)
    assert seen is not None
    assert seen.late_ns == (0, 0, 0)
    assert seen.largest == Gap("ready", "", 0)


def test_a_message_that_takes_longer_is_the_gap_between_sent_and_summed():
    simulated = simulate(PLAN, PROFILE, NETWORK)
    seen = dissect(PLAN, later(simulated, "send", 1, 30, 730), simulated)
    assert seen is not None
    # of two tensors one is 30 and 730 later, the median is half of that
    assert seen.late_ns == (0, 15, 365)
    assert seen.largest == Gap("summed", PROFILE.tensors[1].spec.name, 700)


def test_iterations_that_were_not_recorded_whole_do_not_count():
    simulated = simulate(PLAN, PROFILE, NETWORK, 1)
    cut = Timeline(simulated.plan, 0, tuple(span for span in simulated.spans if (span.kind, span.subject) != ("send", 1)))
    assert dissect(PLAN, cut, simulated) is None


def cell(arm, measured_ns, predicted_ns):
    return Cell("vgg16", 2, 0, 10**9, 0.1, arm, (measured_ns,) * 3, 50, predicted_ns, 40)


def test_the_choice_is_judged_by_what_was_measured_and_the_page_counts_it(tmp_path):
    cells = (
        cell("torch-ddp", 1_000, 1_000),
        cell("wfbp", 100, 90),
        cell("blocks", 120, 80),
        cell("wfbp@server", 100, 110),
        cell("mercury@server", 102, 105),
    )
    trial = TrialResult("vgg16", 2, 1.0, 0.1, cells, {})
    assert trial.loss_of_choice("all-reduce") == pytest.approx(0.2)
    assert trial.loss_of_choice("server") == pytest.approx(0.02)
    errors = [each.error for each in trial.own]
    assert spread(errors) == pytest.approx((0.1, 0.1 + 0.7 * (1 / 3 - 0.1)))  # 3, 10, 10 and 33 %
    results = Results("python -m experiments.fidelity", "a machine", (trial,))
    write(tmp_path / "measured.json", results)
    assert read(tmp_path / "measured.json") == results
    text = page(results)
    assert "| all | 4 | 10.0% | 26.3% | -3.5% | 10.0% | 1 of 2 |" in text
    assert "| vgg16 | 2 | 1 | 10% | 4 | 10.0% | -33.3% blocks | 20.0% (all-reduce), 2.0% (server) |" in text


def test_finals_of_the_choice_and_the_fastest_others_judge_it():
    others = [cell(f"other-{nth}", 110 + nth, 130) for nth in range(4)]
    trial = TrialResult("vgg16", 2, 1.0, 0.1, (cell("blocks", 120, 80), *others[::-1], cell("wfbp@server", 90, 90)), {})
    assert [each.arm for each in trial.finalists] == ["blocks", "other-0", "other-1", "other-2", "wfbp@server"]
    # the lucky one was slower in them
    times = {"torch-ddp": 90, "blocks": 102, "other-0": 115, "other-1": 100, "other-2": 103, "wfbp@server": 95}
    trial = msgspec.structs.replace(trial, finals=tuple(cell(arm, taken, 0) for arm, taken in times.items()))
    assert trial.judged_loss_of_choice("all-reduce") == pytest.approx(0.02)
    assert trial.judged_loss_of_choice("server") == 0
    text = page(Results("", "", (trial,), finals="its command"))
    assert "| 1 of 2 | 2 of 2 |" in text
    assert "beside the 3 fastest others in a later run of 3 measured steps an arm,\n\n    its command" in text
    assert "| 9.1% (all-reduce), 0.0% (server); 2.0% (all-reduce), 0.0% (server) in finals |" in text


def test_finals_of_a_backend_that_runs_again_are_left_behind():
    finals = (cell("torch-ddp", 90, 0), cell("wfbp", 100, 0), cell("blocks", 101, 0), cell("wfbp@server", 95, 0))
    cells = (cell("wfbp", 100, 90), cell("blocks", 90, 100), cell("wfbp@server", 100, 90), cell("blocks@server", 90, 95))
    first = TrialResult("vgg16", 2, 1.0, 0.1, cells, {}, finals)
    again = TrialResult("vgg16", 2, 1.0, 0.1, (cell("wfbp@server", 101, 90), cell("blocks@server", 90, 95)), {})
    both = again.beside(first)
    assert [each.arm for each in both.finals] == ["torch-ddp", "wfbp", "blocks"]
    assert (both.judged, both.judged_loss_of_choice("all-reduce")) == (["all-reduce"], 0)
    text = page(Results("", "", (both,), finals="its command"))
    # of the two choices one is judged by finals, and the other was 12 % slower
    assert "| 0 of 2 | 1 of 1 |" in text
    assert "| 0 of 1 | - |" in text
    assert "within 3 % in 1 of 2." in text


def test_hosts_of_several_ranks_have_a_section_and_arms_of_a_trial_may_come_from_several_runs():
    first = TrialResult("vgg16", 2, 1.0, 0.1, (cell("torch-ddp", 100, 100), cell("wfbp", 100, 90)), {}, ranks_per_host=3)
    assert not first.same_as("vgg16", 2, 1.0)
    assert first.same_as("vgg16", 2, 1.0, 3)
    second = msgspec.structs.replace(first, cells=(cell("torch-ddp", 110, 110), cell("blocks", 100, 105)), others=0.2)
    both = second.beside(first)
    assert [(each.arm, each.median_ns) for each in both.cells] == [("wfbp", 100), ("torch-ddp", 110), ("blocks", 100)]
    assert both.others == 0.2
    text = page(Results("", "", (msgspec.structs.replace(first, ranks_per_host=1),)), Results("its command", "", (both,)))
    assert "| vgg16 | 2 x 3 | 1 | 20% | 2 | 7.5% | -10.0% wfbp | 0.0% (all-reduce) |" in text
    assert "    its command\n" in text
