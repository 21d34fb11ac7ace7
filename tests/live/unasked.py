"""Ways to the values of a tensor which torch goes without asking the tensor for functions of its class."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Named(torch.Tensor):
    """A script's own class."""


def _by_data(param: torch.Tensor) -> torch.Tensor:
    other = torch.zeros(())
    other.data = param
    return other.clone()


def _scattered(param: torch.Tensor) -> torch.Tensor:
    part = torch.empty_like(param)
    torch.distributed.scatter(part, None if torch.distributed.get_rank() else [param, param])
    return part


def _summed(param: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        torch.distributed.group.WORLD.allreduce([param]).wait()
        return param.mul_(0.5).clone()


def _gathered(param: torch.Tensor) -> torch.Tensor:
    found = torch.empty(torch.distributed.get_world_size() * len(param), *param.shape[1:])
    with torch.no_grad():
        torch.distributed.group.WORLD._allgather_base(found, param).wait()
    return found


def _broadcast(param: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        torch.distributed._broadcast_coalesced(torch.distributed.group.WORLD, [param], 1 << 20, 1)
        return param.clone()


def _weighed(param: torch.Tensor) -> torch.Tensor:
    leaf = torch.ones_like(param, requires_grad=True)
    (leaf * 2).backward(param)
    return leaf.grad


UNASKED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "data": _by_data,
    "set_": lambda param: torch.zeros(()).set_(param).clone(),
    "Tensor": lambda param: torch.Tensor(param).detach().clone(),
    "as_subclass": lambda param: param.as_subclass(Named).as_subclass(torch.Tensor).detach().clone(),
    "grad_outputs": _weighed,
    "sparse_coo_tensor": lambda param: torch.sparse_coo_tensor(torch.arange(len(param))[None], param, param.shape).to_dense(),
    "nested_tensor": lambda param: torch.nested.nested_tensor([param, param]).to_padded_tensor(0.0),
    "scatter": _scattered,
    "to_dlpack": lambda param: torch.from_dlpack(torch.to_dlpack(param.detach())).clone(),
    "allreduce": _summed,
    "_allgather_base": _gathered,
    "_broadcast_coalesced": _broadcast,
    "jvp": lambda param: torch.func.jvp(torch.sin, (param,), (param,))[1],
}
"""By the name of a function."""

COLLECTIVE = {"scatter", "allreduce", "_allgather_base", "_broadcast_coalesced"}
"""Those that all ranks have to call."""
