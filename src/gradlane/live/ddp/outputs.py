"""What torch's class does to a module's outputs while it looks for unused parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


class _OneNode(torch.autograd.Function):
    """Hands tensors on, by one node of autograd's graph.

    A backward pass from one of them then comes to what made the others, too, with undefined gradients. Most operations pass
    these on; an `autograd.Function` makes zeros of them, and so gives gradients to parameters that the loss does not use.
    """

    @staticmethod
    def forward(ctx: Any, clones: bool, *outputs: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        return tuple(each.clone() if clones and isinstance(each, torch.Tensor) else each for each in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return (None, *gradients)


def through_one_node(output: Any, clones: bool) -> Any:
    """`output` with those of its tensors that have a graph as this one node hands them on.

    Args:
        output: what a module returned.
        clones: hand on copies, which the script may change in place.
    """
    outputs, structure = tree_flatten(output)
    handed_on = _OneNode.apply(clones, *outputs)  # type: ignore[no-untyped-call]
    return tree_unflatten(
        [
            own if isinstance(own, torch.Tensor) and own.grad_fn is None else new
            for own, new in zip(outputs, handed_on, strict=True)
        ],
        structure,
    )
