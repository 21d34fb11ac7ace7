"""Loops as people write them do under gradlane what they do under DDP, or are told why not."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from tests.commands import ROOT
from tests.live.cases import differences, said_whatever_the_time
from tests.live.loops import LOOPS
from tests.live.loops.page import families, page
from tests.live.ranks import Ranks

pytestmark = pytest.mark.matrix(by=lambda row: LOOPS[row["name"]].family if "name" in row else None)


def outcomes_of(ranks: Ranks, name: str) -> list[dict[str, dict[str, Any]]]:
    """What `compare` found, by rank and arm. An error that is not gradlane's may leave a collective half done: after it the
    ranks are new ones.
    """
    found: list[dict[str, dict[str, Any]]] = [{} for _ in range(ranks.world)]
    at_once = len(LOOPS[name].arms)
    while left := [arm for arm in LOOPS[name].arms if arm not in found[0]][:at_once]:
        answers = ranks.try_run("tests.live.loops:compare", name=name, arms=left)
        answered = all(ok for ok, _ in answers)
        if not answered and at_once > 1:
            at_once = 1  # a rank is gone, and what it had found with it
        else:
            for mine, (ok, more) in zip(found, answers, strict=True):
                mine.update(more if ok else {left[0]: {"error": f"{more[0]}: {more[1]}", "typed": False, "differs": []}})
        new = [mine[arm] for mine in found for arm in left if arm in mine]
        if not answered or any(one["error"] and not one["typed"] for one in new):
            ranks.renew()
    return found


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_gives_the_bits_of_ddp_or_is_told_why_not(two_ranks, name):
    if "cpp" in name and shutil.which("ninja") is None:
        pytest.skip("ninja is not installed, with which torch compiles the extension that reads parameters")
    case, outcomes = LOOPS[name], outcomes_of(two_ranks, name)
    wrong = []
    for arm in case.arms:
        found = [outcome[arm] for outcome in outcomes]
        if case.refused:
            if not (all(one["typed"] for one in found) and any(case.refused in one["error"] for one in found)):
                wrong.append(f"{arm}: not refused: {[one['error'] for one in found]}")
        elif any(one["error"] or one["differs"] for one in found):
            wrong.append(f"{arm}: {[one['error'] or one['differs'][:5] for one in found]}")
    assert not wrong, "\n".join(wrong)
    if case.refused:
        return
    for arm in ("bytescheduler", "hopping"):
        deferred = [outcome[arm]["deferred"] > 0 for outcome in outcomes]
        if case.defers is not None:
            assert deferred == [case.defers] * 2, arm
        lines = said_whatever_the_time(outcomes[0][arm]["lines"])
        if case.says is None:
            assert len(lines) <= 1
        elif case.says:
            assert len(lines) == 1
            assert case.says in lines[0]
        else:
            assert lines == []
        assert outcomes[1][arm]["lines"] == []


@pytest.mark.parametrize("name", [name for name, case in LOOPS.items() if case.family == "buffers" and not case.refused])
def test_rank_0s_announcements_of_buffers_may_come_late(two_ranks, name):
    for outcome in two_ranks.run("tests.live.loops:compare_with_late_announcements", name=name, arms=["bytescheduler"]):
        assert (outcome["bytescheduler"]["error"], outcome["bytescheduler"]["differs"]) == ("", [])


@pytest.mark.parametrize("order", ["planned", "coordinator"])
def test_four_ranks_end_alike_and_as_under_ddp_but_for_rounding(four_ranks, order):
    outcomes = four_ranks.run("tests.live.loops:train_alike", policy="bytescheduler", order=order)
    reference, first = outcomes[0]
    for _, other in outcomes[1:]:
        assert differences(first, other) == []
    for name, value in reference.items():
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-5)


def test_a_group_of_all_ranks_is_trained_in(two_ranks):
    assert two_ranks.run("tests.live.loops:train_in_a_group_of_all_ranks") == [[], []]


@pytest.mark.parametrize("failing", [[0, 1], [1]])
def test_an_exception_in_backward_that_the_script_catches_is_an_error_on_all_ranks(failing):
    ranks = Ranks(2)  # of its own: sums are left half done
    try:
        outcomes = ranks.run("tests.live.loops:unfinished_backward", failing=failing)
        for rank, (kind, text) in enumerate(outcomes):
            # where both fail, either may hear of the other before it finds out itself
            assert kind in ("JobError", "PeerFailed") if rank in failing else kind == "PeerFailed"
            assert "iteration 3: the backward pass was left unfinished" in text
        assert "JobError" in [kind for kind, _ in outcomes]
    finally:
        ranks.close()


def test_the_page_lists_every_loop():
    assert {case.family for case in LOOPS.values()} == families()
    assert (ROOT / "bench" / "notes" / "training-loops.md").read_text() == page()
