"""The checks by name, and for each whether it can be made with given ranks. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.device.machine import NO_DEVICE, Machine, Setup

MODELS = ("convolutions", "tied-transformer")
OPTIMIZERS = tuple(f"{name}, {how}" for name in ("sgd", "adam", "adamw") for how in ("foreach", "fused"))
# loops of tests/live/loops that make no tensors of their own on the CPU, by family
LOOPS = (
    "accumulation_with_no_sync", "accumulation_that_sums_each_pass", "gradients_never_zeroed", "zero_grad_in_place",
    "zero_grad_after_the_step", "zero_grad_between_forward_and_backward", "clip_grad_norm", "clip_grad_value",
    "gradients_replaced_before_the_step", "hooks_on_gradients", "updates_by_hand_without_an_optimizer",
    "an_exception_in_forward_that_the_script_catches", "functional_calls", "two_forward_passes_and_one_backward",
    "a_penalty_on_the_parameters", "two_dtypes_in_one_model", "a_bfloat16_model", "a_channels_last_model",
    "buffers_and_accumulation", "parametrizations",
    "the_model_rolled_back_then_its_optimizer", "the_optimizer_rolled_back_then_its_model", "a_model_with_buffers_rolled_back",
    "saved_to_a_file_and_resumed", "momentum_logged_after_each_step",
    "step_lr", "one_cycle_lr_changes_momentum_too", "two_optimizers", "a_closure_that_is_run_once",
    "an_optimizer_of_the_users_own",
    "gradients_kept", "copies_of_gradients_kept", "gradients_kept_and_zeroed_in_place",
    "a_branch_left_out_by_one_rank_only", "checkpoints", "frozen_parameters", "tied_weights_and_attention",
    "an_expert_a_micro_step", "heads_in_turns_and_gradients_zeroed_in_place",
    "a_buffer_changed_on_rank_0_late", "batch_norm_evaluated_while_training", "running_statistics_reset",
    "weights_clamped_after_each_step", "evaluation_between_steps", "gradients_scaled_all_at_once",
    "averages_in_a_post_hook", "clipping_in_a_pre_hook", "parameters_summed",
)  # fmt: skip
CLIPPING = (
    "by torch", "in two calls", "of order infinity", "by hand", "in some steps", "on one rank", "some parameters", "twice",
    "and read", "by a factor that changes", "scaled alone", "by value", "limited in other forms", "limited by tensors",
    "without NaN", "the norm of what was scaled", "norms that are kept", "in other forms", "by what torch refuses",
)  # fmt: skip
BY_OWNERS = (
    "by torch", "in two calls", "of order infinity", "by hand", "in some steps", "some parameters", "and read",
    "limited by tensors and clipped", "unscaled by the step", "unscaled and clipped", "unscaled by no power of two",
    "unscaled, infinite in one step and parameter",
)  # fmt: skip
FAMILIES = (
    "compiled", "faults", "graphs", "side streams", "equality", "amp", "optimizers", "verify", "synchronisations", "loops",
    "clipping", "default device", "workers",
)  # fmt: skip
FEW_LOOPS = ("accumulation_with_no_sync", "clip_grad_norm", "buffers_and_accumulation", "step_lr", "gradients_kept")


@dataclass(frozen=True)
class Check:
    """One check on one set of ranks.

    Attributes:
        name: of the check; the same for each carrier.
        function: of `tests.device.checks`; all ranks run it.
        carrier: the backend of the sessions.
        arguments: further ones of the function.
        apart: has ranks of its own, since it may leave them unusable.
        dies: the last rank kills itself.
        limit_s: seconds after which it has failed.
    """

    family: str
    name: str
    function: str
    setup: Setup
    carrier: str
    arguments: dict[str, Any] = field(default_factory=dict)
    apart: bool = False
    dies: bool = False
    limit_s: float = 45.0


def checks(setup: Setup, loops: Sequence[str] = LOOPS) -> Iterator[Check]:
    """All checks for ranks that were started so; those that cannot be made are among them, see `why_not`.

    The longest come first.

    Args:
        loops: names of those of tests/live/loops.
    """

    def check(family: str, name: str, function: str, carrier: str, **more: Any) -> Check:
        return Check(family, name, function, setup, carrier, **more)

    for carrier in setup.carriers:
        yield check("compiled", "compiled block", "compiled_block", carrier, limit_s=80.0)
    for carrier in setup.carriers:
        yield check("faults", "rank killed", "killed", carrier, apart=True, dies=True, limit_s=60.0)
        yield check("faults", "exception in one rank", "raises", carrier, apart=True, limit_s=60.0)
        yield check("graphs", "captured backward refused", "captured_backward", carrier, apart=True)
        yield check("graphs", "captured step refused", "captured_step", carrier, apart=True)
    for carrier in setup.carriers:
        yield check("graphs", "captured evaluation replayed", "captured_evaluation", carrier)
        yield check("graphs", "graphed part", "graphed_part", carrier)
        yield check("side streams", "branch on a side stream", "side_stream", carrier)
        for model in MODELS:
            yield check("equality", model, "equality", carrier, arguments={"model": model})
        yield check("amp", "autocast bfloat16", "autocast", carrier)
        yield check("amp", "GradScaler float16", "scaled", carrier)
        yield check("amp", "GradScaler float16, clipping", "scaled", carrier, arguments={"clips": True})
        yield check("workers", "forked, after plans changed", "forked_workers", carrier)
        yield check("default device", "the model's", "default_device", carrier)
        yield check("clipping", "verified", "clipping", carrier, arguments={"way": "by value", "verify": True})
        for optimizer in OPTIMIZERS:
            yield check("optimizers", optimizer, "optimizer", carrier, arguments={"which": optimizer})
        yield check("verify", "verify passes", "verify_passes", carrier)
        yield check("verify", "planted difference found", "planted_difference", carrier, apart=True)
        for way in BY_OWNERS:
            yield check("clipping", f"{way}, owners", "clipping", carrier, arguments={"way": way, "policy": "owners"})
        for way in CLIPPING:
            yield check("clipping", way, "clipping", carrier, arguments={"way": way})
    yield check("compiled", "compiled as a whole, and wrapped", "compiled_whole", "all-reduce", limit_s=80.0)
    yield check("synchronisations", "none in a step", "synchronisations", "all-reduce")
    for carrier in setup.carriers:
        for loop in FEW_LOOPS if setup.group == "nccl" else loops:
            yield check("loops", loop.replace("_", " "), "loop", carrier, arguments={"name": loop})


def is_wanted(check: Check, only: Sequence[str]) -> bool:
    """Whether one of `only` is the family of `check`, or, where no family is called so, a part of its name."""
    return any(part == check.family or (part not in FAMILIES and part in check.name) for part in only)


def why_not(check: Check, machine: Machine) -> str:
    """Why `check` cannot be made on this machine; "" if it can."""
    setup = check.setup
    if setup.stand_in:
        if check.family in ("graphs", "side streams", "synchronisations"):
            return "the stand-in has no CUDA graphs, no side streams of a script and no synchronisations to count"
    elif not machine.cards:
        return NO_DEVICE
    elif check.family == "compiled" and not machine.compiles:
        return "torch.compile needs triton and gcc here"
    if check.family == "synchronisations" and setup.group != "nccl":
        return "over Gloo the host waits for sums by design; they are counted over NCCL"
    if setup.ranks < 2 and (check.family == "faults" or check.name == "planted difference found"):
        return "needs a second rank, and over NCCL each has a device of its own"
    return ""
