"""Validation: checks that a model, its optimizers and its process group can be attached, and describes them as a `Job`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradlane.core.profile import DTYPE_BYTES
from gradlane.errors import InputError, UnsupportedError
from gradlane.live.backends.gradient_buffers import dtype_name
from gradlane.live.session.console import ONCE
from gradlane.live.session.ignored import summed_parameters
from gradlane.live.session.job import Job
from gradlane.live.startup.lifecycle import session_of, sharing_with
from gradlane.live.torch_versions import global_ranks, timeout_of, why_untested

log = logging.getLogger("gradlane")

_WRAPPERS = {  # by the name of a wrapper's class: why it cannot be attached, and what to do
    "DistributedDataParallel": "which sums gradients too: attach to the model before anything wraps it, and do not wrap it",
    "DataParallel": "which computes on copies of the model in one process: start one process a device instead",
    "FullyShardedDataParallel": "whose shards are summed by itself: sharded models are not supported",
}

_ALONE_S = 1800.0  # torch's default; one process waits for servers at most

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def as_list(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """`optimizer` as a list. Raises `InputError` for anything but torch's optimizers."""
    if optimizer is None:
        return []
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for one in optimizers:
        if type(one).__module__.partition(".")[0] == "keras":
            raise InputError(
                f"optimizer: got Keras's {type(one).__name__}, which updates in fit(), expected a torch.optim.Optimizer; "
                "give fit() the callback gradlane.integrations.keras.AverageGradients() instead of calling attach"
            )
        if not isinstance(one, torch.optim.Optimizer):
            raise InputError(
                f"optimizer: got a {type(one).__name__}, expected a torch.optim.Optimizer or several of them "
                "(unwrap Accelerate's and Lightning's: their .optimizer)"
            )
        if not hasattr(one, "_optimizer_step_post_hooks") or not hasattr(one, "_optimizer_state_dict_pre_hooks"):
            raise InputError(
                f"optimizer: got a {type(one).__name__}, which never called Optimizer.__init__, so that torch has no hooks for "
                "it; pass the optimizer that it wraps, most often its .optimizer"
            )
    return optimizers


def refuse_other_optimizers(optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module) -> None:
    """Raise `InputError` for an optimizer that has none of the model's parameters."""
    own = {id(param) for param in model.parameters()}
    for optimizer in optimizers:
        given = [param for group in optimizer.param_groups for param in group["params"]]
        if own.isdisjoint(map(id, given)):
            raise InputError(
                f"optimizer: none of the {len(given)} parameters of this {type(optimizer).__name__} is the model's, expected "
                "an optimizer made from model.parameters() (of this model, after it was moved, converted or loaded)"
            )


def trained_parameters(model: torch.nn.Module, ignored: frozenset[str]) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and parameters whose gradients are summed, the last registered first: about the order in which
    they become ready.

    Args:
        model: to train.
        ignored: names of parameters and buffers that DDP is told to ignore.

    Raises:
        InputError: `model` is no module.
        UnsupportedError: the model cannot be attached; says why and what to do.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model: got a {type(model).__name__}, expected the torch.nn.Module itself")
    for name, module in model.named_modules():
        reason = _WRAPPERS.get(type(module).__name__)
        if reason is not None:
            raise UnsupportedError(f"{name or 'the model'} is a {type(module).__name__}, {reason}")
    if session_of(model) is not None:
        raise UnsupportedError("gradlane is attached to this model already: close() that session first")
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError("the model is a ScriptModule, which takes no hooks: script parts of a model instead")
    summed = summed_parameters(model, ignored)
    are_summed = {id(param) for _, param in summed}
    for name, module in model.named_modules():
        is_embedding = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        if is_embedding and module.sparse and id(module.weight) in are_summed:
            raise UnsupportedError(f"{name} has sparse gradients, which cannot be summed in place: use sparse=False")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if torch.nn.parameter.is_lazy(tensor):
            raise UnsupportedError(f"{name} is uninitialised (a lazy module): run one forward pass before attach")
    params = [(name, param) for name, param in summed if param.requires_grad and param.numel() > 0]
    if not params:
        summed_by_ddp = " whose gradient DistributedDataParallel sums" if ignored else ""
        raise UnsupportedError(f"the model has no parameter with requires_grad=True{summed_by_ddp}")
    for name, param in params:
        if type(param).__name__ == "DTensor" or not isinstance(param, torch.nn.Parameter):
            raise UnsupportedError(
                f"{name} is a {type(param).__name__}: sharded models (FSDP, tensor parallel) are not supported"
            )
        if dtype_name(param) not in DTYPE_BYTES:
            raise UnsupportedError(f"{name} is of {param.dtype}, expected one of {', '.join(DTYPE_BYTES)}")
        of_gradients = getattr(param, "grad_dtype", param.dtype)
        if of_gradients != param.dtype:
            raise UnsupportedError(
                f"{name} is of {param.dtype} and has grad_dtype {of_gradients}, expected the same: gradients are summed in the "
                "dtype of their parameter"
            )
        if param.device != params[0][1].device:
            raise UnsupportedError(
                f"{name} is on {param.device}, others on {params[0][1].device}: one device a rank is supported"
            )
        if hasattr(param, "_in_backward_optimizers"):
            raise UnsupportedError(f"{name} is updated inside the backward pass, before its gradient could be summed")
    refuse_shared(model, params)
    return params[::-1]


def refuse_shared(model: torch.nn.Module, params: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Raise `UnsupportedError` if a session of another model sums the gradient of one of `params`."""
    shared = sharing_with(model, [param for _, param in params])
    if shared is not None:
        session, theirs = shared
        mine = next(name for name, param in params if param is dict(session.summed)[theirs])
        raise UnsupportedError(
            f"{mine} is also {theirs} of a {type(session.model).__name__} that gradlane is attached to, and would be summed "
            "twice: put both models into one module (nn.ModuleDict) and attach to that, or close() that session first"
        )


def job_of(
    model: torch.nn.Module,
    optimizer: Optimizers,
    group: Any,
    timeout_s: float | None,
    wire_dtype: str | None = None,
    ignored: frozenset[str] = frozenset(),
) -> Job:
    """Describe the job to attach; without torch.distributed it has one rank. Rank 0 names a PyTorch that was never tested.

    Args:
        model, optimizer, group: as for `attach`.
        timeout_s: seconds after which waiting for another rank is an error; None for the group's own.
        wire_dtype, ignored: see `Job`.

    Raises:
        InputError: `model` is no module, `optimizer` none of torch's or none of this model, or
            this process is not in `group`.
        UnsupportedError: the model or the group cannot be attached.
    """
    optimizers = as_list(optimizer)
    params = trained_parameters(model, ignored)
    refuse_other_optimizers(optimizers, model)
    if not dist.is_initialized():
        return Job(model, params, optimizers, None, 0, [0], timeout_s or _ALONE_S, wire_dtype, ignored)
    rank = dist.get_rank(group)
    if rank < 0:
        raise InputError(
            f"process_group: got a group without this process (rank {dist.get_rank()}), expected one that it is in; let only "
            "the ranks of a group attach to it"
        )
    ranks = global_ranks(group)
    if len(ranks) < dist.get_world_size() and dist.distributed_c10d._get_default_group().bound_device_id is not None:
        raise UnsupportedError(
            f"process_group has {len(ranks)} of the {dist.get_world_size()} ranks, and init_process_group was given a "
            "device_id=: torch.distributed then makes every group by a call of all ranks; leave device_id= out"
        )
    untested = why_untested()
    if untested is not None and rank == 0:
        log.warning("gradlane: %s", untested, extra=ONCE)
    return Job(model, params, optimizers, group, rank, ranks, timeout_s or timeout_of(group), wire_dtype, ignored)


def require_process_group() -> None:
    """Raise `InputError` unless torch.distributed is initialised."""
    if not dist.is_initialized():
        raise InputError("torch.distributed is not initialised: call torch.distributed.init_process_group() before attach")


def trains_alone() -> bool:
    """Whether this process was started alone and has no process group.

    Raises:
        InputError: it was started as one of several ranks, and has none either.
    """
    if dist.is_initialized():
        return False
    if os.environ.get("WORLD_SIZE", "1") != "1":
        require_process_group()
    return True
