"""What gradlane advise concludes from what it measured."""

from __future__ import annotations

import pytest
from msgspec import structs

from gradlane import zoo
from gradlane.cli.advise import _trial, doubt, rows, unknown, verdict
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.profile import Profile
from gradlane.core.records.ddp_run import DdpRun
from gradlane.errors import InputError
from gradlane.planning import catalog
from gradlane.planning.advice import advise
from gradlane.planning.plans import make_plan
from gradlane.sim import iteration_ns

pytestmark = pytest.mark.fast

PROFILE: Profile = zoo.profile("resnet50")
MS = 10**6


def run(bytes_per_second: int, workers: int = 4, rest_ns: int = 0, **changes: object) -> DdpRun:
    """What would be measured of resnet50 if the simulator were right."""
    network = Network.line(workers, 100_000, bytes_per_second)
    plan = make_plan(catalog.get("ddp"), PROFILE, Place(network))
    step_ns = iteration_ns(plan, PROFILE, network) + rest_ns
    alone_ns = PROFILE.compute_ns + rest_ns
    measured = DdpRun(
        "resnet50", "cpu", workers, (step_ns,) * 5, (alone_ns,) * 3, (step_ns - alone_ns,) * workers, PROFILE, network, plan
    )
    return structs.replace(measured, **changes)


@pytest.mark.parametrize("clips", [False, True])
def test_of_a_script_that_reads_its_parameters_after_each_step_no_option_defers_updates(clips):
    advice = advise(run(60 * 10**6, clips=clips, reads_norms_alone=clips, reads_parameters=True))
    assert not any(option.plan.crosses_barrier for option in advice.options)
    assert any("reads its parameters after each step" in line for line in unknown(advice))


def test_where_something_waits_the_best_policy_is_named_and_ddp_is_simulated_as_it_is():
    advice = advise(run(200 * 10**6))
    assert advice.is_worth_it
    assert advice.off == pytest.approx(0, abs=0.001)
    assert advice.best.iteration_ns < advice.baseline.iteration_ns
    assert all(option.iteration_ns >= advice.bound_ns for option in advice.options)
    assert all(option.saves <= advice.possible for option in advice.options)
    assert verdict(advice).endswith(f"{advice.best.policy} would save {advice.saves:.0%} of the step, and no schedule can "
                                    f"save more than {advice.possible:.1%} (simulated).")  # fmt: skip


def test_no_more_is_promised_than_summing_was_measured_to_add():
    measured = run(200 * 10**6)
    alone_ns = round(0.98 * measured.step_ns[0])
    advice = advise(structs.replace(measured, alone_ns=(alone_ns,)))
    assert advice.saves <= advice.possible <= advice.costs == pytest.approx(0.02, abs=0.001)
    assert not advice.is_worth_it


def test_on_a_fast_network_there_is_nothing_to_gain():
    advice = advise(run(50 * 10**9))
    assert not advice.is_worth_it
    assert verdict(advice).startswith("Nothing to gain here: summing gradients adds 0.")


def test_where_the_network_is_the_limit_scheduling_is_not_the_answer():
    advice = advise(run(10**6))
    assert advice.is_bound_by_network
    assert "bfloat16" in verdict(advice)
    assert advice.halved_bound_ns < 0.6 * advice.bound_ns


def test_what_summing_takes_from_the_processor_is_not_called_waiting():
    fast = run(50 * 10**9)
    advice = advise(structs.replace(fast, step_ns=tuple(2 * step for step in fast.step_ns)))
    assert not advice.is_worth_it
    assert "it takes its time from the processor" in verdict(advice)
    assert advice.is_doubtful
    assert str(doubt(advice)).startswith("Take this as rough: DDP's step is ")
    assert "50% less (what summing takes from the processor is not simulated" in str(doubt(advice))


def test_where_the_measured_step_is_far_below_the_bound_nothing_is_concluded():
    slow = run(200 * 10**6)
    advice = advise(structs.replace(slow, step_ns=(round(0.4 * slow.step_ns[0]),) * 5))
    assert advice.is_refuted
    assert verdict(advice).startswith("No conclusion: no schedule takes less than ")
    assert not advise(slow).is_refuted


def test_what_a_script_does_beside_computing_is_part_of_the_step():
    advice = advise(run(200 * 10**6, rest_ns=500 * MS))
    assert advice.profile.uncovered_ns == 500 * MS
    assert advice.profile.compute_ns == PROFILE.compute_ns + 500 * MS
    assert advise(run(200 * 10**6)).best.saves > advice.best.saves


def test_of_a_script_that_clips_gradients_no_update_is_deferred():
    clipped, free = advise(run(60 * 10**6, clips=True)), advise(run(60 * 10**6))
    assert not any(option.plan.crosses_barrier for option in clipped.options)
    assert clipped.best.saves < free.best.saves
    assert any("clips gradients" in line for line in unknown(clipped))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_of_a_script_that_clips_by_the_norm_only_owners_defers_updates(device):
    measured = structs.replace(run(60 * 10**6, clips=True), reads_norms_alone=True, device=device)
    clipped = advise(measured)
    assert [option.policy for option in clipped.options if option.plan.crosses_barrier] == ["owners"]
    assert any("only `owners` defers updates" in line for line in unknown(clipped))


@pytest.mark.parametrize(("alone", "policies"), [(True, ["owners"]), (False, [])])
def test_of_a_script_with_a_grad_scaler_owners_defer_updates_unless_it_clips_otherwise(alone, policies):
    measured = structs.replace(run(60 * 10**6, clips=not alone), scales=True, reads_norms_alone=alone)
    scaled = advise(measured)
    assert [option.policy for option in scaled.options if option.plan.crosses_barrier] == policies
    assert any("the script has a GradScaler" in line for line in unknown(scaled))


def test_a_record_comes_back_and_one_rank_is_refused():
    measured = run(10**9)
    assert DdpRun.from_json(measured.to_json()) == measured
    with pytest.raises(InputError, match="got one rank"):
        advise(structs.replace(measured, workers=1))


def test_steps_that_differ_are_told():
    measured = run(10**9)
    steady, (step, *rest) = unknown(advise(measured)), measured.step_ns
    assert not any("p10 to p90" in line or "longer than those with sums" in line for line in steady)
    uneven = unknown(advise(structs.replace(measured, step_ns=(2 * step, *rest), alone_ns=(2 * step,))))
    assert sum("p10 to p90" in line or "longer than those with sums" in line for line in uneven) == 2


def test_all_parts_are_of_the_measured_step():
    measured = run(200 * 10**6)
    # DDP's step is measured to take twice what is simulated, all of it by waiting
    slow = advise(structs.replace(measured, step_ns=tuple(2 * step for step in measured.step_ns)))
    assert slow.off == pytest.approx(-0.5, abs=0.001)
    saved_ns = slow.baseline.expected_ns - slow.best.expected_ns
    assert slow.best.saves == pytest.approx(saved_ns / slow.step_ns)
    assert slow.costs == pytest.approx(1 - slow.alone_ns / slow.step_ns)
    ((cells, _),) = [row for row in rows(slow) if slow.best.policy in row[0][0].split(", ")]
    assert cells[2].endswith(f"({slow.best.saves:.1%})")


@pytest.mark.parametrize("measured", [0.99, 2.5])  # times what is simulated
def test_no_schedule_saves_more_than_its_own_bound_leaves_of_the_measured_step(measured):
    found = run(200 * 10**6)
    advice = advise(structs.replace(found, step_ns=tuple(round(measured * step) for step in found.step_ns)))
    assert advice.possible == pytest.approx(1 - advice.bound_ns / advice.step_ns)
    assert all(option.saves <= advice.possible for option in advice.options)


def test_a_report_has_the_steps_and_the_savings_of_the_text():
    found = run(200 * 10**6)
    advice = advise(structs.replace(found, step_ns=tuple(2 * step for step in found.step_ns)))
    trial = _trial(advice)
    arms = {arm.name: arm for arm in trial.arms}
    for option in advice.options:
        assert arms[option.policy].predicted_ms == option.expected_ns / 1e6
        assert arms[option.policy].speedup == pytest.approx((1 / (1 - option.saves),) * 3)
        parts = arms[option.policy].parts
        total_ms = parts.forward + parts.backward + parts.update + parts.wait + parts.other
        assert total_ms == pytest.approx(option.expected_ns / 1e6, abs=1e-5)
    assert trial.limit == pytest.approx(1 / (1 - advice.possible))


def test_a_simulator_that_is_right_is_not_doubted():
    advice = advise(run(200 * 10**6))
    assert not advice.is_doubtful
    assert doubt(advice) is None


def test_policies_that_do_not_differ_share_a_row():
    advice = advise(run(200 * 10**6))
    names = [name for (shared, *_), _ in rows(advice) for name in shared.split(", ")]
    assert sorted(names) == sorted([*(option.policy for option in advice.options), "as it is"])
    assert len({cells[1:3] + cells[4:] for cells, _ in rows(advice)}) == len(rows(advice)) < len(advice.options)
    assert sum(is_best for _, is_best in rows(advice)) == 1
    assert advice.differs
    assert not advise(run(10**12, rest_ns=10_000 * MS)).differs
