"""The policy is found while a job trains: on all ranks at once, without a bit of difference, and to an end."""

from __future__ import annotations

import re
from itertools import pairwise

import msgspec
import pytest

from gradlane.cli.launch import launch
from gradlane.errors import InputError
from gradlane.planning import catalog
from gradlane.planning.ranking import SAFE
from tests.commands import EXAMPLE, gradlane
from tests.live.cases import said_whatever_the_time
from tests.live.ranks import Ranks

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("options", [{}, {"backend": "server"}, {"order": "coordinator"}])
def test_auto_ends_on_one_plan_on_all_ranks_and_every_step_on_the_way_equals_ddp(two_ranks, options):
    first, second = two_ranks.run("tests.live.auto:train", **options)
    for found in (first, second):
        assert found["differs"] == []
        assert found["losses"]
        assert found["params"]
    assert first["plans"] == second["plans"]
    assert len(set(first["plans"])) >= 2
    assert second["auto"] is None
    assert second["lines"] == []
    auto = first["auto"]
    look, *later = auto.looks  # a busy machine may have it look again
    verdicts = said_whatever_the_time(first["lines"])
    assert verdicts[: 1 + len(later)] == [f"gradlane: {each.verdict}" for each in (look, *later)]
    assert auto.looks[-1].verdict.startswith(f"auto keeps {auto.kept}: ")
    backends = [options["backend"]] if "backend" in options else ["all-reduce"] if options else ["all-reduce", "server"]
    free = len(backends) > 1
    assert look.tried[0].choice == auto.safe == msgspec.structs.replace(SAFE, backend="all-reduce" if free else None)
    assert auto.backend == ("any" if free else backends[0])
    assert look.tried
    assert {each.choice.policy for each in look.predicted} <= {name for each in backends for name in catalog.names(each)}
    assert {each.choice.backend for each in look.predicted} == (set(backends) if free else {None})
    assert first["plan"].policy == auto.kept.policy
    assert first["plan"].backend == (auto.kept.backend if free else msgspec.UNSET)
    assert sum(len(tried.times_ns) for tried in look.tried) <= 50
    # the timeline begins with the change to the plan in force, on both ranks at the same iteration
    assert first["switches"] == second["switches"] == [auto.switches[-1].iteration]


@pytest.mark.parametrize(("victim", "backend"), [(1, "all-reduce"), (0, "all-reduce"), (1, "server")])
def test_a_rank_that_is_killed_while_plans_are_tried_ends_the_job_with_its_name(victim, backend):
    ranks = Ranks(2)
    try:
        outcomes = ranks.try_run("tests.live.auto:killed_while_looking", victim=victim, backend=backend)
    finally:
        ranks.close()
    killed, how = outcomes[victim]
    assert not killed
    assert how[1] == "exit code -9"
    ok, outcome = outcomes[1 - victim]
    assert ok, outcome
    assert outcome[0] == "PeerDied"
    assert outcome[1] < 10


@pytest.mark.parametrize("backend", ["all-reduce", "server"])
@pytest.mark.extra
def test_five_hundred_changes_of_plan_change_no_bit(two_ranks, backend):
    unmarked = [name for name in catalog.names(backend) if name not in ("geryon", "searched")]
    for found in two_ranks.run("tests.live.auto:change_at_random", names=tuple(unmarked), changes=500, backend=backend):
        assert found["differs"] == []
        assert found["losses"]
        assert found["changes"] == 500
        assert found["plans"] > 50


def test_three_hundred_changes_of_plan_and_carrier_change_no_bit(two_ranks):
    unmarked = [name for name in catalog.names() if name not in ("geryon", "searched")]
    for found in two_ranks.run("tests.live.auto:change_at_random", names=tuple(unmarked), changes=300, both=True):
        assert found["differs"] == []
        assert found["losses"]
        assert found["changes"] == 300
        assert found["plans"] > 50
        assert sum(before != after for before, after in pairwise(found["carriers"])) > 80
        assert set(found["carriers"]) == {"all-reduce", "server", "UNSET"}


def test_launch_takes_auto_for_a_script_that_knows_nothing_of_it():
    done = gradlane("launch", "--nproc", 2, "--policy", "auto", EXAMPLE)
    assert done.stdout == EXAMPLE.with_suffix(".out").read_text()


def test_auto_with_knobs_is_refused(two_ranks):
    with pytest.raises(InputError, match="--policy auto with --knob, --tune or --knobs"):
        launch(["--policy", "auto", "--tune", str(EXAMPLE)])
    for kind, text in two_ranks.run("tests.live.tuned:refused", policy="auto", tune=True):
        assert kind == "InputError"
        assert "neither with auto" in text


@pytest.mark.timing
@pytest.mark.parametrize("backend", ["all-reduce", "server"])
def test_a_network_that_becomes_slower_makes_it_look_again(two_ranks, backend):
    first, second = two_ranks.run("tests.live.auto:through_a_change", policy="auto", delays_s=(0.004, 0.04), backend=backend)
    for found in (first, second):
        assert found["differs"] == []
        assert found["losses"]
    assert first["plans"] == second["plans"]
    before, *_, after = first["auto"].looks
    assert before.why == "the job has begun"
    assert "take" in after.why
    assert "times as long" in after.why
    assert after.verdict.endswith(f"looked again since {after.why}")
    assert first["lines"] == [f"gradlane: {look.verdict}" for look in first["auto"].looks]


@pytest.mark.timing
@pytest.mark.parametrize("backend", ["all-reduce", "server"])
def test_prophet_profiles_until_it_repeats_itself_and_assembles_its_blocks_anew_for_a_slower_network(two_ranks, backend):
    first, second = two_ranks.run("tests.live.auto:through_a_change", policy="prophet", delays_s=(0.001, 0.01), backend=backend)
    for found in (first, second):
        assert found["differs"] == []
        assert found["losses"]
        assert found["auto"] is None
        (iterations,) = re.findall(r"live, median of (\d+) iterations", found["profiled"])
        assert 4 <= int(iterations) <= 50
    assert first["plans"] == second["plans"]
    assert first["rate"] < second["rate"]
    assert any("prophet plans anew for" in line for line in first["lines"])
    assert second["lines"] == []


@pytest.mark.timing
def test_layers_that_run_in_another_order_make_it_look_again_with_a_profile_of_that_order(two_ranks):
    first, second = two_ranks.run("tests.live.auto:through_another_order")
    for found in (first, second):
        assert found["differs"] == []
        assert found["losses"]
    assert any("of a backward pass earlier or later" in look.why for look in first["auto"].looks)
    ready = {seen.spec.name: seen.ready_ns for seen in first["profile"].tensors}
    weights = [ready[f"layers.{layer}.weight"] for layer in range(len(ready) // 2)]
    assert weights[0] < weights[len(weights) // 2] < weights[-1]  # the first layer runs last, and has its gradient first


def test_two_models_that_train_in_turns_try_plans_one_after_the_other(two_ranks):
    first, second = two_ranks.run("tests.live.auto:two_in_turns")
    assert first["differs"] == second["differs"] == [[], []]
    assert second["auto"] == [None, None]
    ends = []
    for auto in first["auto"]:
        look = auto.looks[0]
        ends.append([each.at_ns for each in auto.switches if look.began <= each.iteration <= look.ended])
    earlier, later = sorted((switches for switches in ends if switches), key=min)
    assert max(earlier) < min(later)


@pytest.mark.parametrize("clips", [True, False])
def test_a_session_without_a_policy_finds_its_own_and_knows_whether_each_step_waits_for_all_sums(two_ranks, clips):
    for found in two_ranks.run("tests.live.auto:clipping", clips=clips):
        assert found["differs"] == []
        assert found["losses"]
        assert found["crosses"] is not clips
