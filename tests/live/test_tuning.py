"""Knobs are tried while a job trains: on all ranks at once, without a bit of difference, and to an end."""

from __future__ import annotations

import re

import pytest

from gradlane.cli.launch import launch
from gradlane.core import files
from gradlane.core.records.tuned import Tuned
from gradlane.errors import InputError
from gradlane.planning.tuning import TuneOptions
from tests.commands import EXAMPLE, gradlane
from tests.live.cases import said_whatever_the_time
from tests.live.ranks import Ranks

pytestmark = pytest.mark.matrix

QUICK = TuneOptions(search="random", trials=8, iterations=2, loss=1e9)
SLICES = ("bytescheduler", {"partition_bytes": 4000, "credit_bytes": 8000})
GERYON = ("geryon", {"slice_bytes": 4000})


def check(outcomes, trials):
    """Both ranks trained as DDP does, under the same plan in each iteration, and rank 0 has `trials` on record."""
    first, second = outcomes
    for found in outcomes:
        assert found["differs"] == []
        assert found["losses"]
    assert first["plans"] == second["plans"]
    assert second["tuned"] is None
    tuned = first["tuned"]
    assert trials <= len(tuned.trials) <= trials + 4
    assert tuned.knobs in [trial.knobs for trial in tuned.trials]
    (line,) = said_whatever_the_time(first["lines"])
    assert "tuned in" in line
    assert second["lines"] == []
    return tuned


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (SLICES, {}),
        (SLICES, {"order": "coordinator"}),
        (SLICES, {"backend": "server"}),
        (("p3", {"slice_bytes": 4000}), {}),
        (("blocks", {}), {}),
        *((GERYON, {"backend": backend}) for backend in ("all-reduce", "server")),
    ],
)
def test_a_tuning_run_ends_and_every_step_of_it_equals_ddp(two_ranks, policy, options):
    outcomes = two_ranks.run("tests.live.tuned:tune", policy=policy, options=QUICK, **options)
    tuned = check(outcomes, 8)
    assert all(found["params"] for found in outcomes)
    assert tuned.trials[0].knobs.items() <= {**policy[1], "least_bytes": 256 * 1024, "threshold_percent": 50}.items()
    if policy is GERYON:
        assert len({trial.knobs["threshold_percent"] for trial in tuned.trials}) > 3
    if policy is SLICES:
        assert len(set(outcomes[0]["plans"])) >= 6


@pytest.mark.parametrize("backend", ["all-reduce", "server"])
def test_it_does_so_with_updates_owed_while_the_plan_changes(two_ranks, backend):
    options = TuneOptions(search="random", trials=5, iterations=2, loss=1e9)
    case = {"policy": SLICES, "options": options, "slow": True, "flush": False, "backend": backend}
    outcomes = two_ranks.run("tests.live.tuned:tune", **case)
    check(outcomes, 5)
    assert all(found["deferred"] > 10 for found in outcomes)


def test_the_gaussian_process_begins_where_the_simulator_says_and_what_it_finds_is_kept_and_used(two_ranks, tmp_path):
    file = tmp_path / "tuned.json"
    options = TuneOptions(trials=5, iterations=2, loss=1e9)
    outcomes = two_ranks.run("tests.live.tuned:tune", policy=SLICES, options=options, knobs=file)
    tuned = check(outcomes, 5)
    assert files.read(file, Tuned) == tuned
    assert (tuned.policy, tuned.model, tuned.workers, tuned.backend) == ("bytescheduler", "Mlp", 2, "all-reduce")

    # on a second run it is where trying begins
    again = two_ranks.run("tests.live.tuned:tune", policy=SLICES, options=options, knobs=file)
    assert again[0]["tuned"].trials[0].knobs == tuned.knobs

    kept = files.read(file, Tuned)
    for how, largest in two_ranks.run("tests.live.tuned:use", knobs=file):
        assert how == "trained"
        assert largest <= kept.knobs["partition_bytes"]

    for options, says in (
        ({"knobs": file, "policy": "p3"}, "is of policy bytescheduler, this job has p3"),
        ({"knobs": file, "other_model": True}, "is of model Mlp, this job has Linear"),
        ({"knobs": tmp_path / "absent.json"}, "absent.json', which does not exist; expected a file that a run with tune left"),
    ):
        for how, text in two_ranks.run("tests.live.tuned:use", **options):
            assert how == "MismatchError"
            assert text.startswith("rank 0 (")
            assert says in text


def test_a_disk_that_is_full_when_the_tuning_ends_costs_one_line_and_not_the_job(two_ranks, tmp_path):
    file = tmp_path / "tuned.json"
    (tmp_path / "tuned.json.part").mkdir()  # what is written first cannot be
    first, second = two_ranks.run("tests.live.tuned:tune", policy=SLICES, options=QUICK, knobs=file)
    assert first["differs"] == second["differs"] == []
    assert len(first["tuned"].trials) >= 8
    tuned, lost = said_whatever_the_time(first["lines"])
    assert "tuned in" in tuned
    assert "tuned.json was not written, and the job goes on" in lost
    assert not file.exists()


@pytest.mark.parametrize(
    ("policy", "says"),
    [("wfbp", "policy wfbp: it declares no knobs to tune"), ("searched", "policy searched: it declares no knobs to tune")],
)
def test_a_policy_without_knobs_to_tune_is_refused_on_every_rank(two_ranks, policy, says):
    for kind, text in two_ranks.run("tests.live.tuned:refused", policy=policy, tune=True):
        assert kind == "InputError"
        assert says in text


def test_ranks_that_do_not_all_tune_are_told_so(two_ranks):
    for kind, text in two_ranks.run("tests.live.tuned:only_rank_0_tunes"):
        assert kind == "MismatchError"
        assert "TuneOptions" in text


@pytest.mark.parametrize("backend", ["all-reduce", "server"])
def test_a_rank_that_is_killed_in_a_trial_ends_the_job_with_its_name(backend):
    ranks = Ranks(2)
    try:
        (ok, outcome), (killed, how) = ranks.try_run("tests.live.tuned:killed_in_a_trial", backend=backend)
    finally:
        ranks.close()
    assert not killed
    assert how[1] == "exit code -9"
    assert ok, outcome
    kind, seconds, tuned = outcome
    assert kind == "PeerDied"
    assert seconds < 10
    assert len(tuned.trials) >= 2


@pytest.mark.extra
def test_launch_tunes_a_script_that_knows_nothing_of_it_and_keeps_what_it_found(tmp_path):
    file = tmp_path / "tuned.json"
    done = gradlane("launch", "--nproc", 2, "--policy", "bytescheduler", "--tune", "--knobs", file, EXAMPLE)
    assert done.stdout == EXAMPLE.with_suffix(".out").read_text()
    assert done.stderr.count("bytescheduler tuned in") == 1
    tuned = files.read(file, Tuned)
    assert tuned.trials[0].knobs == {"partition_bytes": 2**20, "credit_bytes": 4 * 2**20}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--plan", "plan.json", "--tune"], "got --plan with --tune or --knobs"),
        (["--plan", "plan.json", "--knobs", "k.json"], "got --plan with --tune or --knobs"),
        (["--policy", "wfbp", "--tune"], "--tune: got policy wfbp, which has no knobs to tune"),
        (["--knobs", "absent.json"], "--knobs: got 'absent.json', which is not a file"),
        (["--policy", "ddp", "--policy", "p3"], "--policy: got ddp and p3, expected one"),
        (
            ["--policy", "p3", "--knob", "slice_bytes=1MiB", "--tune", "--knobs", str(EXAMPLE)],
            f"--knob: got it with --knobs {EXAMPLE}, which has the policy's knobs",
        ),
    ],
)
def test_launch_refuses_what_cannot_be_tuned_before_it_starts_anything(options, says):
    with pytest.raises(InputError, match=re.escape(says)):
        launch([*options, str(EXAMPLE)])
