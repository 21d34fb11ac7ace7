"""Actions on gradients, for between backward and step."""

from __future__ import annotations

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from tests.live.programs.run import Run, action


@action
def norm(run: Run) -> None:
    run.see("norm", nn.utils.get_total_norm([param.grad for param in run.with_gradients()]))


@action
def clip(run: Run, most: str) -> None:
    run.see("clipped norm", nn.utils.clip_grad_norm_(run.parameters(), float(most)))


@action
def clip_value(run: Run, most: str) -> None:
    if run.with_gradients():  # torch would object
        nn.utils.clip_grad_value_(run.parameters(), float(most))


@action
def adaptive_clip(run: Run) -> None:
    """By the norm of each parameter."""
    for param in run.with_gradients():
        most = param.detach().norm() * 0.01
        param.grad.mul_(torch.clamp(most / (param.grad.norm() + 1e-6), max=1.0))


@action
def scale(run: Run, how: str, which: str = "all", *_: str) -> None:
    params = run.with_gradients(which)
    if how == "foreach":
        if params:
            torch._foreach_mul_([param.grad for param in params], 0.7)
        return
    for param in params:
        if how == "mul":
            param.grad.mul_(0.7)
        elif how == "operator":
            param.grad *= 0.7
        elif how == "data":
            param.grad.data.mul_(0.7)
        elif how == "detached":
            param.grad.detach().mul_(0.7)
        elif how == "view":
            param.grad.view(-1)[:3].mul_(0.7) if param.grad.is_contiguous() else param.grad[:1].mul_(0.7)
        elif how == "replace":
            param.grad = param.grad * 0.7
        elif how == "replace_data":
            param.grad.data = param.grad.data * 0.7
        elif how == "copy":
            param.grad.copy_(param.grad.clone() * 0.7)
        elif how == "set":
            param.grad.set_(param.grad.detach() * 0.7)
        elif how == "numpy":
            param.grad.numpy()[...] *= 0.7
        elif how == "out":
            torch.mul(param.grad, 0.7, out=param.grad)
        else:
            raise ValueError(how)


@action
def drop(run: Run, which: str) -> None:
    """Set some gradients to None."""
    for param in run.parameters(which):
        param.grad = None


@action
def make(run: Run, which: str) -> None:
    """Give parameters a gradient of the script's own."""
    for param in run.parameters(which):
        param.grad = torch.full_like(param, 0.01)


@action
def swap_gradients(run: Run) -> None:
    """Parameters of one shape exchange their gradients."""
    by_shape: dict[tuple[int, ...], nn.Parameter] = {}
    for param in run.with_gradients():
        other = by_shape.pop((*param.shape,), None)
        if other is None or other.dtype != param.dtype:
            by_shape[(*param.shape,)] = param
        else:
            param.grad, other.grad = other.grad, param.grad


@action
def flat(run: Run) -> None:
    """Gradients are flattened, scaled, and copied back."""
    params = run.with_gradients()
    for dtype in {param.dtype for param in params}:
        gradients = [param.grad for param in params if param.grad.dtype == dtype]
        joined = _flatten_dense_tensors(gradients)
        run.see("flat", joined)
        joined.mul_(0.8)
        for gradient, part in zip(gradients, _unflatten_dense_tensors(joined, gradients), strict=True):
            gradient.copy_(part)


@action
def flat_buffers(run: Run) -> None:
    """From now on gradients are views of flat buffers of the script's, until something replaces them."""
    run.flat = []
    for dtype in dict.fromkeys(param.dtype for param in run.parameters()):
        some = [param for param in run.parameters() if param.dtype == dtype and param.requires_grad]
        run.flat.append(torch.zeros(sum(param.numel() for param in some), dtype=dtype))
        for param, part in zip(some, torch.split(run.flat[-1], [param.numel() for param in some]), strict=True):
            param.grad = part.view(param.shape)


@action
def scale_flat_buffers(run: Run) -> None:
    for buffer in run.flat:
        run.see("flat buffer", buffer.norm())
        buffer.mul_(0.8)


@action
def zero_flat_buffers(run: Run) -> None:
    for buffer in run.flat:
        buffer.zero_()


@action
def flat_views(run: Run) -> None:
    """Gradients become views of one flat buffer."""
    params = run.with_gradients()
    for dtype in {param.dtype for param in params}:
        some = [param for param in params if param.grad.dtype == dtype]
        joined = torch.cat([param.grad.reshape(-1) for param in some])
        for param, part in zip(some, torch.split(joined, [param.numel() for param in some]), strict=True):
            param.grad = part.view(param.shape)
        joined.mul_(0.9)
