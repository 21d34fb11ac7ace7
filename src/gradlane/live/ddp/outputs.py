"""What torch's class does to a module's outputs while it looks for unused parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


class _OneNode(torch.autograd.Function):
    """Hands tensors on, by one node of autograd's graph.

    A backward pass from one of them then comes to what made the others, too, with undefined gradients. Most operations pass
    these on. An `autograd.Function` makes zeros of them, which become gradients of parameters that the loss does not use.
    """

    @staticmethod
    def forward(ctx: Any, clones: bool, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(each.clone() for each in outputs) if clones else outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return (None, *gradients)


def through_one_node(output: Any, clones: bool) -> Any:
    """Hand on those tensors of a module's output that have a graph, and the rest as it is.

    Args:
        output: what the module returned.
        clones: hand on copies, which the script may change in place.

    Returns:
        `output` with other tensors in it.
    """
    outputs, structure = tree_flatten(output)
    places = [place for place, each in enumerate(outputs) if isinstance(each, torch.Tensor) and each.grad_fn is not None]
    if places:
        handed_on = _OneNode.apply(clones, *(outputs[place] for place in places))  # type: ignore[no-untyped-call]
        for place, tensor in zip(places, handed_on, strict=True):
            outputs[place] = tensor
    return tree_unflatten(outputs, structure)
