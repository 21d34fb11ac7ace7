"""Programs that once gave other numbers than DDP, or an error that is not gradlane's own, by what they do.

Each is about as small as it gets. A new one comes from `python -m tests.live.programs`, which prints its JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.live.programs.program import Program

PLAIN = ("zero_grad", "backward", "step")


def _program(*steps: tuple[str, ...], **rest: Any) -> Program:
    """`steps` behind two plain ones, in which gradlane defers no update yet."""
    return Program((PLAIN, PLAIN, *steps), **rest)


KEPT: dict[str, Program] = {
    # updates that are owed
    "a_second_step_on_the_same_gradients": _program((*PLAIN, "step"), PLAIN),
    "optimizer_state_read_by_hand": _program((*PLAIN, "state read"), PLAIN),
    "optimizer_state_cleared_by_hand": _program((*PLAIN, "state clear"), PLAIN),
    "optimizer_state_scaled_by_hand": _program((*PLAIN, "state scale"), PLAIN),
    "optimizer_state_replaced_by_hand": _program((*PLAIN, "state new"), PLAIN),
    "the_optimizer_rolled_back_before_the_model": _program(PLAIN, (*PLAIN, "rollback optimizer model"), PLAIN),
    "the_optimizer_rolled_back_alone": _program(PLAIN, (*PLAIN, "rollback optimizer"), PLAIN),
    # under the drop-in
    "a_graph_used_twice": _program(("zero_grad", "backward again", "step"), PLAIN, way="bytescheduler late wrapped"),
    "the_module_called_past_its_wrapper": _program(
        (*PLAIN, "backward past", "step"), ("zero_grad", "backward past", "step"), PLAIN, way="bytescheduler late wrapped"
    ),
    # hooks of optimizers
    "a_step_pre_hook_that_clips_registered_after_attach": _program(PLAIN, PLAIN, hooks=("after step_pre clip",)),
    "a_step_pre_hook_by_the_class_that_clips_more_than_the_optimizer_has": _program(
        PLAIN, PLAIN, optimizer="part", hooks=("after unbound_step_pre clip",)
    ),
    "a_step_pre_hook_by_the_class_before_a_closure": _program(("closure",), hooks=("after unbound_step_pre scale",)),
    "a_step_pre_hook_by_the_class_that_keeps_gradients": _program(
        PLAIN, ("zero_grad", "backward", "look"), hooks=("after unbound_step_pre keep",)
    ),
    "an_optimizer_that_keeps_gradients": _program(
        (*PLAIN, "keep last"), ("zero_grad", "backward", "look"), optimizer="keeping"
    ),
    "a_step_pre_hook_that_sets_an_option_registered_after_attach": _program(PLAIN, PLAIN, hooks=("after step_pre rate",)),
    "a_step_post_hook_that_averages_registered_before_attach": _program(PLAIN, PLAIN, hooks=("before step_post average",)),
    "a_step_post_hook_that_writes_registered_before_attach": _program(PLAIN, PLAIN, hooks=("before step_post renorm",)),
    "a_step_post_hook_that_zeroes_gradients_registered_before_attach": _program(
        PLAIN, PLAIN, hooks=("before step_post zero_grad",)
    ),
    "a_step_post_hook_that_reads_the_state": _program(PLAIN, PLAIN, hooks=("after step_post state",)),
    # steps that raise
    "a_step_that_counts_before_it_raises": _program(
        PLAIN, ("zero_grad", "backward", "stumble rate"), PLAIN, optimizer="adam_fused", way="owners mixed wrapped"
    ),
    # what runs in gradlane while a script traces
    "a_trace_ahead_of_the_sums": _program(PLAIN, ("zero_grad", "backward", "represent trace @1", "step"), PLAIN),
    # references that a script keeps
    "references_to_gradients": _program(("zero_grad", "backward", "keep gradients", "step"), ("zero_grad", "backward", "look")),
    "surgery_on_references_to_gradients": _program(("surgery references", "step"), PLAIN),
    "references_to_the_values_of_parameters": _program(("zero_grad", "keep parameter_data", "backward", "step", "look")),
    "numpy_arrays_of_parameters": _program(("zero_grad", "keep parameter_numpy", "backward", "step", "look")),
    "a_state_dict_that_is_not_copied": _program(("zero_grad", "keep state_dict", "backward", "step", "look")),
    "the_optimizers_state_that_is_not_copied": _program(("zero_grad", "keep state", "backward", "step", "look")),
    "gradients_that_are_views_of_flat_buffers": _program(
        ("flat_buffers", "backward", "scale_flat_buffers", "step", "zero_flat_buffers"), ("backward", "step")
    ),
    # the memory of gradients
    "the_data_of_gradients_replaced": _program(("zero_grad", "backward", "scale replace_data", "step"), PLAIN),
    "gradients_set_to_other_memory": _program(("zero_grad", "backward", "scale set", "step"), PLAIN),
    "gradients_that_change_places": _program(("zero_grad", "backward", "swap_gradients", "step"), ("backward", "step")),
    "gradients_detached_in_place": _program(("zero_grad detached", "backward", "step")),
    # buffers
    "buffers_changed_on_all_ranks": _program((*PLAIN, "buffer add"), PLAIN, model="buffers"),
    "buffers_changed_on_rank_0": _program((*PLAIN, "buffer add @0"), PLAIN, model="buffers"),
    "buffers_changed_on_rank_1": _program((*PLAIN, "buffer add @1"), PLAIN, model="buffers"),
    "buffers_changed_through_their_data": _program((*PLAIN, "buffer data"), PLAIN, model="buffers"),
    "every_buffer_changed": _program((*PLAIN, "buffer zero"), PLAIN, model="buffers"),
    "a_model_with_buffers_rolled_back": _program((*PLAIN, "rollback model optimizer"), PLAIN, model="convolutions"),
    "two_forward_passes_with_batch_norm_and_one_backward_pass": _program(
        ("zero_grad", "backward twice", "step"), PLAIN, model="convolutions"
    ),
    "a_forward_pass_that_raises_before_the_module_is_called_past_its_wrapper": _program(
        (*PLAIN, "stumble forward_end"),
        ("zero_grad", "backward past", "step"),
        PLAIN,
        model="convolutions",
        way="bytescheduler late wrapped",
    ),
    "passes_in_evaluation_mode_that_are_summed": _program(
        ("zero_grad", "backward eval", "backward no_sync eval", "backward eval", "step"),
        ("zero_grad", "backward no_sync", "backward eval", "backward", "backward eval", "step"),
        ("zero_grad", "backward eval", "step"),
        model="convolutions",
    ),
    "a_copy_of_the_optimizer_made_on_one_rank": _program((*PLAIN, "rollback optimizer"), (*PLAIN, "duplicate both @1"), PLAIN),
    # gradients of passes before
    "a_part_left_out_on_one_rank_whose_gradients_are_kept": _program(
        ("zero_grad", "backward", "step"), ("backward left,right|left", "step"), PLAIN, model="branches"
    ),
    "a_part_left_out_of_the_pass_that_sums": _program(
        ("zero_grad", "backward no_sync", "backward left", "step"), PLAIN, model="branches"
    ),
    "a_penalty_on_the_inputs_gradient_while_gradients_accumulate": _program(("backward slope", "step"), PLAIN),
    # calls of the model inside of a backward pass
    "a_checkpoint_around_a_model_whose_forward_pass_writes_buffers": _program(
        ("zero_grad", "backward recomputed", "step"), ("zero_grad", "backward recomputed", "step"), PLAIN, model="buffers"
    ),
    "an_evaluation_in_a_hook_behind_a_pass_in_evaluation_mode": _program(
        ("mode eval", "zero_grad", "backward evaluated_inside", "step"),
        ("mode train", "zero_grad", "backward past evaluated_inside", "step"),
        PLAIN,
        model="convolutions",
        way="bytescheduler late wrapped",
    ),
    # no_sync around a part of a pass
    "only_the_backward_pass_in_no_sync": _program(("zero_grad", "backward no_sync_backward", "step"), PLAIN),
    "a_penalty_on_the_inputs_gradient_and_only_the_backward_pass_in_no_sync": _program(
        ("zero_grad", "backward no_sync_backward slope", "step"), PLAIN
    ),
    "only_the_forward_pass_in_no_sync": _program(("zero_grad", "backward no_sync_forward", "step"), PLAIN),
    "a_forward_pass_without_a_backward_pass_before_no_sync": _program(("zero_grad", "forward", "backward no_sync", "step")),
}

SERVED_LATE = "mercury late served"
KEPT |= {
    # where the update is on the servers
    "an_evaluation_of_new_values_that_are_late": _program((*PLAIN, "evaluate no_grad"), model="static", way=SERVED_LATE),
    "new_values_read_by_a_function_of_torch_in_c": _program((*PLAIN, "unasked as_subclass"), PLAIN, way=SERVED_LATE),
    "new_values_read_by_a_state_dict_that_is_not_copied": _program(
        ("zero_grad", "keep state_dict", "backward", "step", "look"), PLAIN, way=SERVED_LATE
    ),
    "new_values_read_by_numpy_arrays": _program(
        ("zero_grad", "keep parameter_numpy", "backward", "step", "look"), PLAIN, way=SERVED_LATE
    ),
    "buffers_of_an_evaluation_in_another_dtype": _program(
        (*PLAIN, "cast bfloat16 through"), model="convolutions", way=SERVED_LATE
    ),
    "buffers_of_a_forward_pass_that_raised_at_its_end": _program(
        (*PLAIN, "stumble forward_end"), PLAIN, PLAIN, model="buffers", way="p3 mixed served"
    ),
    "buffers_of_a_checkpoint_around_the_model": _program(
        ("zero_grad", "backward reentrant", "step"), PLAIN, model="convolutions", way="bytescheduler mixed served"
    ),
    "buffers_of_a_checkpoint_that_is_run_once_more": _program(
        ("zero_grad", "backward recomputed", "step"), PLAIN, model="buffers", way=SERVED_LATE
    ),
    "parameters_of_a_script_that_are_frozen_later": _program(
        ("zero_grad in_place", "backward", "step", "freeze first"),
        ("zero_grad in_place", "backward", "step"),
        model="scripted",
        way=SERVED_LATE,
    ),
    "a_step_pre_hook_by_the_class_that_clips_what_servers_have": _program(
        PLAIN, hooks=("after unbound_step_pre clip",), way=SERVED_LATE
    ),
    "state_of_the_servers_read_without_fetching_it": _program((*PLAIN, "state read"), PLAIN, way=SERVED_LATE),
    "state_of_the_servers_fetched_and_changed": _program((*PLAIN, "fetch_state", "state scale"), PLAIN, way=SERVED_LATE),
    "state_of_the_servers_fetched_in_place_of_a_step": _program(
        ("zero_grad", "backward", "fetch_state"), PLAIN, way=SERVED_LATE
    ),
    "the_data_of_a_gradient_replaced_that_servers_have": _program(
        ("zero_grad", "backward", "scale replace_data", "step"), PLAIN, way=SERVED_LATE
    ),
}


@dataclass(frozen=True)
class Open:
    """A cause that is not mended. leaves_out: what generated programs do without meanwhile."""

    why: str
    leaves_out: tuple[str, ...]
    programs: tuple[str, ...]


OPEN: tuple[Open, ...] = ()

WITHOUT: tuple[str, ...] = tuple(words for cause in OPEN for words in cause.leaves_out)
WHY_OPEN: dict[str, str] = {name: cause.why for cause in OPEN for name in cause.programs}
