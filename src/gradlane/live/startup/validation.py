"""Validation: checks that model, optimizers and process group can be attached; copies rank 0's
parameters to all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradlane.core.profile import DTYPE_BYTES
from gradlane.errors import InputError, UnsupportedError
from gradlane.live.session.job import Job
from gradlane.live.startup.lifecycle import session_of

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def as_list(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """`optimizer` as a list. Raises `InputError` for anything but torch's optimizers."""
    optimizers = [] if optimizer is None else [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            raise InputError(
                f"optimizer: got a {type(one).__name__}, expected a torch.optim.Optimizer or several of them "
                "(unwrap Accelerate's and Lightning's: their .optimizer)"
            )
    return optimizers


def trained_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and parameters that get gradients, the last registered first: about the order in which
    they become ready.

    Raises:
        UnsupportedError: the model cannot be attached; says why and what to do.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise UnsupportedError(
            "the model is wrapped in DistributedDataParallel, which sums its gradients already: pass .module"
        )
    if session_of(model) is not None:
        raise UnsupportedError("gradlane is attached to this model already: close() that session first")
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError("the model is a ScriptModule, which takes no hooks: script parts of a model instead")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            raise UnsupportedError(f"{name} has sparse gradients, which cannot be summed in place: use sparse=False")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if torch.nn.parameter.is_lazy(tensor):
            raise UnsupportedError(f"{name} is uninitialised (a lazy module): run one forward pass before attach")
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad and param.numel() > 0]
    if not params:
        raise UnsupportedError("the model has no parameter with requires_grad=True")
    for name, param in params:
        if type(param).__name__ == "DTensor" or not isinstance(param, torch.nn.Parameter):
            raise UnsupportedError(
                f"{name} is a {type(param).__name__}: sharded models (FSDP, tensor parallel) are not supported"
            )
        if str(param.dtype).removeprefix("torch.") not in DTYPE_BYTES:
            raise UnsupportedError(f"{name} is of {param.dtype}, expected one of {', '.join(DTYPE_BYTES)}")
        if param.device != params[0][1].device:
            raise UnsupportedError(
                f"{name} is on {param.device}, others on {params[0][1].device}: one device a rank is supported"
            )
        if hasattr(param, "_in_backward_optimizers"):
            raise UnsupportedError(f"{name} is updated inside the backward pass, before its gradient could be summed")
    return params[::-1]


def job_of(model: torch.nn.Module, optimizer: Optimizers, group: Any, timeout_s: float) -> Job:
    """Describe the job to attach.

    Args:
        model, optimizer, group: as for `attach`.
        timeout_s: seconds after which a sum that has not ended is an error.

    Raises:
        InputError: `optimizer` is none of torch's.
        UnsupportedError: the model cannot be attached, or `group` does not have all ranks.
    """
    optimizers = as_list(optimizer)
    params = trained_parameters(model)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if world != dist.get_world_size():
        # each lane needs a group of its own, and torch.distributed's names for groups of some ranks
        # are ambiguous
        has = "does not have this rank" if rank < 0 else f"has {world} of the {dist.get_world_size()} ranks"
        raise UnsupportedError(f"process_group {has}, expected one of all ranks")
    return Job(model, params, optimizers, group, rank, world, timeout_s)


def require_process_group() -> None:
    """Raise `InputError` unless torch.distributed is initialised."""
    if not dist.is_initialized():
        raise InputError("torch.distributed is not initialised: call torch.distributed.init_process_group() before attach")


def copy_from_rank_0(tensors: Sequence[torch.Tensor], group: Any) -> None:
    """Broadcast rank 0's `tensors` to all ranks, as DDP does at construction; one broadcast for
    each dtype (collective).
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    for of_dtype in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in of_dtype])
        dist.broadcast(flat, 0, group)
        for tensor, values in zip(of_dtype, torch.split(flat, [tensor.numel() for tensor in of_dtype]), strict=True):
            tensor.copy_(values.view(tensor.shape))
