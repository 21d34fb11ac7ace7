"""What DistributedDataParallel is told to leave alone: tensors that are each rank's own, such as shards of a layer.

Scripts name them with `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`. Everything here reads the names
as torch's class does, in all versions of PyTorch that gradlane supports.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator

import torch


def ignored_in(model: torch.nn.Module) -> frozenset[str]:
    """The full names of the parameters and buffers of `model` that torch's class would ignore."""
    return frozenset(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def summed_parameters(model: torch.nn.Module, ignored: Container[str]) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and parameters whose gradients torch's class sums where they are trained, in order of registration.

    It builds each name as "module.parameter". The name of a parameter of `model` itself then begins with a dot and is never
    in `ignored`, so its gradient is summed all the same. A tied parameter is ignored if each of its names is.
    """
    summed = {id(param) for name, param in _named_by_torchs_class(model) if name not in ignored}
    return [(name, param) for name, param in model.named_parameters() if id(param) in summed]


def ignored_beside(model: torch.nn.Module, summed: Iterable[torch.nn.Parameter], ignored: Collection[str]) -> frozenset[str]:
    """What is ignored where torch's class sums the gradients of `summed` and no others, whatever they are called now.

    Args:
        model: as it is now.
        summed: what was trained when torch's class wrapped the model: it looks for parameters once.
        ignored: names that torch's class was given then. They still hold for buffers, which it looks for in each forward pass.

    Returns:
        Names of parameters and buffers. A parameter of `model` itself is there under both of its names, "p" and ".p".
    """
    ids = {id(param) for param in summed}
    names = {form: param for name, param in _named_by_torchs_class(model) for form in (name, name.removeprefix("."))}
    return frozenset(ignored).difference(names).union(name for name, param in names.items() if id(param) not in ids)


def _named_by_torchs_class(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of `model` as "module.parameter"; a tied one comes under each of its names."""
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            yield f"{prefix}.{name}", param


def synchronised_buffers(model: torch.nn.Module, ignored: Container[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and buffers that torch's class keeps equal to rank 0's."""
    return ((name, buffer) for name, buffer in model.named_buffers() if name not in ignored)


def synchronised_tensors(model: torch.nn.Module, ignored: Container[str]) -> list[torch.Tensor]:
    """The parameters and buffers that become rank 0's when torch's class wraps `model`."""
    params = [param for name, param in model.named_parameters() if name not in ignored]
    return [*params, *(buffer for _, buffer in synchronised_buffers(model, ignored))]
