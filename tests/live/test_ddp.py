"""gradlane.DistributedDataParallel in the place of torch's: DDP's bits, and the updates deferred."""

from __future__ import annotations

import re

import pytest

from tests.live import changed_models, ddp
from tests.live.loops import LOOPS

pytestmark = pytest.mark.matrix

NAMES = [
    "step_lr",
    "two_optimizers",
    "accumulation_with_no_sync",
    "clip_grad_norm",
    "a_closure_that_is_run_once",
    "averages_of_the_model",
    "forward_passes_for_buffers_alone",
    "buffers_of_its_own_on_each_rank",
    "evaluation_of_another_kind_on_each_rank",
    "half_and_back_for_a_save",
    "parametrized_in_the_middle",
    "a_branch_left_out_by_one_rank_only",
    "a_compiled_step",
    "a_model_compiled_before_it_is_wrapped",
    "a_model_compiled_in_place_before_it_is_wrapped",
    "a_model_compiled_around_its_wrapper",
    "a_trunk_frozen_while_a_head_warms_up",
    "tensors_that_ddp_is_told_to_ignore",
    "two_parameters_with_one_gradient",
    "a_gradient_given_to_another_parameter_too",
    "gradients_dropped_by_hooks_registered_early",
    "gradients_scaled_by_hooks_registered_late",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_with_the_drop_in_gives_the_bits_of_ddp_and_defers_updates(two_ranks, name):
    for found in two_ranks.run("tests.live.loops:compare", name=name, arms=["drop-in"]):
        found = found["drop-in"]
        assert (found["error"], found["differs"]) == ("", [])
        assert LOOPS[name].defers is not True or found["deferred"] > 0


SAYS = {
    "joins": "join() lets ranks run out",
    "joins_as_one_of_several": "join() lets ranks run out",
    "trained_on_after_close": "the session was closed",
    "converted_after_it_was_wrapped": "was torch.float32 when the model was wrapped and is torch.float64 now",
    "a_gradient_of_inputs_taken_before_a_static_graph_is_known": "static_graph=True has taken another backward pass",
    "trained_in_evaluation_mode": "the model is in evaluation mode",
    "a_hook_of_the_scripts": "a communication hook takes its buckets",
    "a_hook_after_some_steps": "a communication hook takes its buckets",
    "a_hook_that_compresses": "gradlane sums with --wire-dtype float16",
    "a_built_in_hook": "gradlane sums with --wire-dtype float16",
    "a_built_in_hook_after_some_steps": "gradlane sums with --wire-dtype float16",
    "a_hook_for_buffers": "a hook makes its buffers equal",
    "another_process_group": "it is given another process group",
    "passes_that_the_script_ends": "with require_manual_backward_finalization",
    "passes_that_the_script_ends_after_some_steps": "with require_manual_backward_finalization",
    "parameters_replaced_in_each_call": "is not in the model in this pass",
    "parameters_replaced_in_one_call": "is not in the model in this pass",
}
ANEW = {"a_second_optimizer_later", "an_optimizer_of_each_phase"}
ANSWERS = {
    "validated_with_the_module_alone_back_in_training": True,
    "a_second_optimizer_later": ["SGD", "Adam"],
    "an_optimizer_of_each_phase": ["Adam"],
    "parameters_replaced_in_one_call": False,
    "a_hook_that_changes_nothing": False,  # gradlane sums
}


@pytest.mark.parametrize("name", ddp.LOOPS)
def test_what_scripts_do_with_a_wrapper_gives_the_bits_of_torchs(two_ranks, name):
    outcomes = two_ranks.run("tests.live.ddp:compare", name=name)
    for differs, answer, _ in outcomes:
        assert differs == []
        assert answer == ANSWERS.get(name, True if name in SAYS else None)
    lines = outcomes[0][2]
    assert len([line for line in lines if SAYS.get(name, "torch's DistributedDataParallel") in line]) == (name in SAYS)
    assert not [line for line in lines if "reads gradients (step)" in line]  # an optimizer that the session does not know
    assert bool([line for line in lines if "a new optimizer steps the model" in line]) == (name in ANEW)


def test_a_hook_that_compresses_to_what_wire_dtype_names_leaves_the_sums_to_gradlane(two_ranks):
    assert two_ranks.run("tests.live.ddp:a_hook_that_wire_dtype_does") == [(True, True)] * 2


@pytest.mark.parametrize("from_the_start", [True, False])
def test_buffers_that_appear_later_become_rank_0s_as_under_torchs_class(two_ranks, from_the_start):
    found = two_ranks.run("tests.live.ddp:buffers_that_appear_and_move", from_the_start=from_the_start)
    assert found == [([], True)] * 2


def test_the_module_called_without_its_wrapper_keeps_each_ranks_buffers(two_ranks):
    for differs, torchs, ours in two_ranks.run("tests.live.ddp:the_module_called_by_itself"):
        assert differs == []
        assert ours == torchs


@pytest.mark.parametrize("verify", [False, True])
def test_a_backward_pass_that_torchs_class_would_not_sum_is_not_summed_and_one_line_says_so(two_ranks, verify):
    (differs, (line, *verified)), (others, lines) = two_ranks.run("tests.live.ddp:past_the_wrapper", verify=verify)
    assert differs == others == lines == []
    assert "a graph that is used twice, or a call of the module inside" in line
    assert [text.endswith("equal to DDP bit for bit") for text in verified] == [True] * verify


def test_a_model_that_is_converted_behind_its_wrapper_has_one_line_of_rank_0_alone(two_ranks):
    (differs, _, (line,)), (others, _, lines) = two_ranks.run("tests.live.ddp:compare", name="converted_after_it_was_wrapped")
    assert differs == others == lines == []
    assert "was torch.float32 when the model was wrapped and is torch.float64 now" in line


def test_outputs_are_the_scripts_own_where_torchs_class_gives_clones(two_ranks):
    for differs in two_ranks.run("tests.live.ddp:outputs_that_are_changed"):
        assert differs == []


def test_an_output_that_the_loss_leaves_out_gives_the_gradients_that_torchs_class_gives(two_ranks):
    for differs in two_ranks.run("tests.live.ddp:outputs_that_the_loss_leaves_out"):
        assert differs == []


def test_the_module_inside_is_compiled_and_exported_as_one_graph(two_ranks):
    for differs, deferred in two_ranks.run("tests.live.ddp:compiled_past_the_wrapper"):
        assert differs == []
        assert deferred > 0


@pytest.mark.parametrize("to_torch", [False, True], ids=["gradlane's", "then torch's"])
def test_a_part_that_was_frozen_when_it_was_wrapped_is_summed_by_neither_and_one_line_says_so(two_ranks, to_torch):
    (differs, (line,)), (others, lines) = two_ranks.run("tests.live.ddp:a_part_frozen_when_wrapped", to_torch=to_torch)
    assert differs == others == lines == []
    assert "layers.0.weight was frozen when the model was wrapped and is trained now: its gradient is not summed" in line


NOT_SUMMED = "its gradient is not summed, as under DDP, so ranks drift apart; wrap the model again after that"
SAID_OF_PARTS = {
    "a_layer_that_was_frozen_gets_a_parametrization": [
        "layers.0.bias was frozen when the model was wrapped and is trained now"
    ],
    "adapters_are_merged": ["layers.0.weight was frozen when the model was wrapped and is trained now"],
    "all_that_was_trained_has_gone": ["layers.0.weight was frozen", "the model has no parameter with requires_grad=True whose"],
    "a_layer_is_added_to_the_optimizer": ["layers.3.weight was put into the model after gradlane attached"],
    "a_layer_is_added": ["layers.3.weight was put into the model after it was wrapped"],
}


@pytest.mark.parametrize("verify", [False, True], ids=["", "verified"])
@pytest.mark.parametrize("name", changed_models.LOOPS)
def test_what_was_trained_when_a_model_was_wrapped_is_summed_whatever_it_is_called_later(two_ranks, name, verify):
    (differs, lines), (others, theirs) = two_ranks.run("tests.live.changed_models:compare", name=name, verify=verify)
    assert differs == others == theirs == []
    verified = [line for line in lines if line.endswith("equal to DDP bit for bit")]
    assert bool(verified) == verify
    said = [line for line in lines if line not in verified and "a new optimizer steps the model" not in line]
    expected = SAID_OF_PARTS.get(name, [])
    assert len(said) == len(expected)
    assert all(part in line for part, line in zip(expected, said, strict=True))
    assert all(NOT_SUMMED in line for line in said if "torch's DistributedDataParallel sums" not in line)


@pytest.mark.parametrize(
    ("wrapped", "again"), [(True, "wrap the model again"), (False, "close() the session and attach again")]
)
def test_a_layer_that_comes_under_the_optimizer_that_there_is_is_named_as_not_summed(two_ranks, wrapped, again):
    lines, silent = two_ranks.run("tests.live.changed_models:added_under_one_optimizer", wrapped=wrapped)
    (said,) = [line for line in lines if "its gradient is not summed" in line]
    assert said.startswith("gradlane: layers.3.weight was put into the model after gradlane attached")
    assert said.endswith(f"{again} after that")
    assert silent == []


def test_two_wrapped_models_are_both_scheduled(two_ranks):
    assert two_ranks.run("tests.live.ddp:two_models") == [([], [True, True])] * 2


@pytest.mark.parametrize("hides", [False, True], ids=["an output that comes later", "an output that hides the loss"])
def test_a_backward_pass_that_begins_inside_of_a_checkpoint_is_summed_whole(two_ranks, hides):
    assert two_ranks.run("tests.live.ddp:checkpointed_aside", hides=hides) == [([], [])] * 2


CALLS_IN_BACKWARD_PASSES = (
    "checkpointed", "checkpointed reentrantly", "a step inside of another", "a forward pass inside of another",
    "an evaluation inside of its own",
)  # fmt: skip


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("which", CALLS_IN_BACKWARD_PASSES)
def test_a_call_of_the_wrapper_inside_of_a_backward_pass_is_as_any_other(two_ranks, which, verify):
    assert two_ranks.run("tests.live.ddp:calls_in_backward_passes", which=which, verify=verify) == [([], [])] * 2


@pytest.mark.parametrize("when", ["before", "later, first of all"])
def test_a_pre_hook_of_the_module_has_rank_0s_buffers(two_ranks, when):
    assert two_ranks.run("tests.live.ddp:buffers_changed_by_a_hook", when=when) == [[]] * 2


@pytest.mark.parametrize("first", [True, False])
def test_a_wrapper_that_is_told_to_leave_buffers_alone_or_not_any_more_is_left_to_torch(two_ranks, first):
    (differs, (line,)), (others, lines) = two_ranks.run("tests.live.ddp:buffers_left_alone_later", first=first)
    assert differs == others == lines == []
    assert f"broadcast_buffers was {first} at the first step and is {not first} now" in line


def test_a_rank_that_leaves_buffers_alone_evaluates_with_its_own(two_ranks):
    for differs, (torchs, ours) in two_ranks.run("tests.live.ddp:evaluated_with_own_buffers"):
        assert differs == []
        assert torchs == ours


def test_what_the_drop_in_cannot_honour_is_refused_by_name(two_ranks):
    for (attached,) in two_ranks.run("tests.live.ddp:refusals"):
        assert attached.startswith("gradlane is attached to this model, which sums its gradients")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("stays_torchs", "0 has sparse gradients"),
        ("summed_by_python", "torch._dynamo.config.optimize_ddp is 'python_reducer'"),
    ],
)
def test_a_model_that_gradlane_refuses_stays_torchs_and_one_line_says_why(two_ranks, name, why):
    (torchs, (line,)), (others, lines) = two_ranks.run(f"tests.live.ddp:{name}")
    assert torchs
    assert others
    assert lines == []
    assert f"torch's DistributedDataParallel sums the gradients: {why}" in line


def test_a_fork_calls_its_copy_of_the_wrapper_without_a_word(two_ranks):
    assert two_ranks.run("tests.live.ddp:in_a_fork") == [(True, 7, [])] * 2


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("tries", [1, 2])
def test_one_rank_alone_may_call_the_model_again_after_an_error_and_buffers_follow_rank_0s(two_ranks, which, tries):
    found, others = two_ranks.run("tests.live.ddp:one_rank_tries_again", which=which, tries=tries)
    assert len(found[0]) == 4
    assert found == others


def test_one_line_names_who_reads_gradients_or_needs_updates_at_once(two_ranks):
    first, second = two_ranks.run("tests.live.ddp:readers")
    (clips,), (averages,) = first["clips"], first["averages"]
    assert re.fullmatch(r"gradlane: ddp\.py:\d+ reads gradients \(clip_grad_norm_\) between backward and step: .*", clips)
    assert re.fullmatch(r"gradlane: updates were needed .* \(ddp\.py:\d+ reads parameters\): from now on .*", averages)
    assert second == {"clips": [], "averages": []}


def test_the_drop_in_looks_like_torchs_before_and_after_it_is_scheduled(two_ranks):
    for found in two_ranks.run("tests.live.ddp:looks_like_torchs"):
        assert all(found)


def test_the_session_of_a_dropped_wrapper_is_closed_when_the_next_model_is_wrapped(two_ranks):
    assert two_ranks.run("tests.live.ddp:dropped_wrappers_leave_nothing") == [[True, True, False]] * 2


def test_one_rank_may_train_the_bare_module_when_its_wrapper_is_gone(two_ranks):
    assert two_ranks.run("tests.live.ddp:one_rank_trains_on_without_its_wrapper") == [([], True)] * 2
