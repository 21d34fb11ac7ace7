"""Actions: forward and backward passes, alone and as methods that need several of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.live.programs.models import loss_of
from tests.live.programs.run import Run, action
from tests.live.settings import SETTINGS


def _split(words: tuple[str, ...]) -> tuple[str, set[str]]:
    """Which parts are used, and the flags."""
    flags = {word for word in words if word in FLAGS}
    take = [word for word in words if word not in FLAGS]
    return (take[0] if take else ""), flags


FLAGS = {
    "no_sync",
    "no_sync_backward",  # forward outside: DDP sums, since its forward pass prepares it for that
    "no_sync_forward",  # backward outside: DDP does not sum
    "twice",  # two forward passes, one backward pass
    "again",  # two backward passes over one graph; where the model is attached and not wrapped, inside no_sync only
    "past",  # the module is called, past its wrapper
    "weighted",
    "scaled",  # by a GradScaler
    "infinite",  # the loss
    "penalty",  # on the parameters, computed outside of the model
    "slope",  # a penalty on the gradient of the input
    "functional",  # with parameters that are computed from the model's
    "zeroed_between",  # zero_grad between forward and backward
    "autocast",
    "eval",  # in evaluation mode, as when fine-tuning
    "anomaly",  # found by torch, which keeps where each operation stood
    "elsewhere",  # what the backward pass needs is packed away meanwhile
    "counted",  # by a mode that sees every operation
    "each",  # two forward passes, and a backward pass through each
    "inputs",  # the backward pass is told for which tensors
    "graph",  # the backward pass makes a graph itself
    "recomputed",  # the whole model is under a checkpoint
    "reentrant",  # as `recomputed`, of the other kind
    "evaluated_inside",  # the backward pass
    "inner",  # a backward pass of another graph inside of it
    "retained",  # the gradient of the output
}


class Counted(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


SURROUNDINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "anomaly": torch.autograd.detect_anomaly,
    "elsewhere": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda value: value),
    "counted": Counted,
}


@action
def backward(run: Run, *words: str) -> None:
    take, flags = _split(words)
    if "eval" in flags:
        run.call.eval()
    with contextlib.ExitStack() as around:
        for name in flags & SURROUNDINGS.keys():
            around.enter_context(SURROUNDINGS[name]())
        with run.no_sync() if flags & {"no_sync", "no_sync_forward"} else contextlib.nullcontext():
            loss = _loss(run, take, flags)
            if "no_sync" in flags:
                _backward(run, loss, flags)
            other = run.loss(take) if "each" in flags else None
        if "no_sync" not in flags:
            with run.no_sync() if "no_sync_backward" in flags else contextlib.nullcontext():
                _backward(run, loss, flags)
                if other is not None:
                    _backward(run, other, flags)
    if "eval" in flags:
        run.call.train()
    run.see("loss", float(loss))


def _loss(run: Run, take: str, flags: set[str]) -> torch.Tensor:
    with torch.autocast(
        run.device.type, dtype=torch.float16 if "scaled" in flags else torch.bfloat16, enabled="autocast" in flags
    ):
        if "slope" in flags:
            loss = _loss_with_a_slope(run, take)
        elif "functional" in flags:
            loss = _functional_loss(run, take)
        elif flags & {"recomputed", "reentrant"}:
            loss = _recomputed_loss(run, take, "reentrant" in flags)
        else:
            loss = run.loss(take, past="past" in flags)
        if "twice" in flags:
            loss = loss + run.loss(take)
    if "weighted" in flags:
        loss = loss * 0.5
    if "penalty" in flags:
        loss = loss + 0.01 * torch.stack([param.square().sum().float() for param in run.parameters()]).sum()
    if "infinite" in flags:
        loss = loss * math.inf
    return loss


def _backward(run: Run, loss: torch.Tensor, flags: set[str]) -> None:
    if "zeroed_between" in flags:
        zero_grad(run)
    if "scaled" in flags:
        loss = run.scaler.scale(loss)
    if "evaluated_inside" in flags:
        loss.register_hook(lambda _: evaluate(run, "no_grad"))
    if "inner" in flags:
        loss.register_hook(lambda _: _inner_backward(run))
    if "retained" in flags:
        loss.retain_grad()
    how = {"create_graph": True} if "graph" in flags else {}
    if "inputs" in flags:
        how["inputs"] = [param for param in run.parameters() if param.requires_grad]
    run.backward(loss, retain_graph="again" in flags or None, **how)
    if "again" in flags:
        run.backward(loss)
    if "retained" in flags:
        run.see("slope of the loss", loss.grad)


def _inner_backward(run: Run) -> None:
    with torch.enable_grad():
        weight = torch.ones(3, requires_grad=True)
        (weight * 2).sum().backward()
    run.see("inner gradient", weight.grad)


def _recomputed_loss(run: Run, take: str, reentrant: bool) -> torch.Tensor:
    run.take(take)
    x, y = run.batch()
    if x.is_floating_point():
        x.requires_grad_()  # else a reentrant checkpoint has no gradients
    return loss_of(checkpoint(run.call, x, use_reentrant=reentrant and x.is_floating_point()), y)


def _functional_loss(run: Run, take: str) -> torch.Tensor:
    run.take(take)
    x, y = run.batch()
    prefix = "" if run.call is run.model else "module."
    scaled = {prefix + name: param * 0.9 for name, param in run.model.named_parameters()}
    return loss_of(torch.func.functional_call(run.call, scaled, (x,)), y)


def _loss_with_a_slope(run: Run, take: str) -> torch.Tensor:
    run.take(take)
    x, y = run.batch()
    if not x.is_floating_point():
        return loss_of(run.call(x), y)
    x.requires_grad_()
    loss = loss_of(run.call(x), y)
    return loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()


@action
def forward(run: Run, *words: str) -> None:
    """A training forward pass whose loss is only looked at."""
    run.see("loss of a forward pass", float(run.loss(_split(words)[0])))


@action
def evaluate(run: Run, mode: str) -> None:
    """no_grad, inference_mode or enable_grad."""
    run.call.eval()
    with getattr(torch, mode)():
        run.see("evaluation", float(run.loss()))
    run.call.train()


@action
def zero_grad(run: Run, mode: str = "") -> None:
    """in_place, model, model_in_place, by_hand, data, detached, or as optimizers do it by default."""
    if mode.startswith("model"):
        run.model.zero_grad(set_to_none=mode == "model")
    elif mode in ("", "in_place"):
        for optimizer in run.optimizers:
            optimizer.zero_grad(set_to_none=mode == "")
    elif mode == "by_hand":
        for param in run.parameters():
            param.grad = None
    else:
        for param in run.with_gradients():
            if mode == "data":
                param.grad.data.zero_()
            else:
                param.grad.detach_()
                param.grad.zero_()


@action
def step(run: Run, index: str = "") -> None:
    """Of all optimizers, or of one."""
    for optimizer in run.optimizers if not index else run.optimizers[int(index) : int(index) + 1]:
        optimizer.step()


@action
def step_under(run: Run, setting: str) -> None:
    """With torch set otherwise than for the forward pass."""
    with SETTINGS[setting.replace("_", " ")]():
        step(run)


@action
def scaled_step(run: Run, unscaled: str = "") -> None:
    """Of a GradScaler, after its `unscale_` and clipping where `unscaled` says so."""
    for optimizer in run.optimizers:
        if not any(param.grad is not None for group in optimizer.param_groups for param in group["params"]):
            continue  # the scaler would object
        if unscaled:
            run.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(run.parameters(), 0.5)
        run.scaler.step(optimizer)
    run.scaler.update()
    run.see("scale", run.scaler.get_scale())


@action
def step_if_finite(run: Run) -> None:
    """A script's own guard against a bad batch."""
    norm = nn.utils.get_total_norm([param.grad for param in run.with_gradients()])
    run.see("norm", norm)
    if torch.isfinite(norm):
        step(run)


@action
def mode(run: Run, how: str) -> None:
    """From now on: train, eval, or eval for the first part alone (as when its BatchNorm is frozen)."""
    run.call.train(how != "eval")
    if how == "part":
        next(run.model.children()).eval()


@action
def closure(run: Run, *words: str) -> None:
    """`optimizer.step(closure)`, with the whole step in the closure."""

    def compute() -> torch.Tensor:
        run.optimizers[0].zero_grad()
        loss = run.loss(_split(words)[0])
        run.backward(loss)
        return loss.detach()

    run.see("loss of a closure", run.optimizers[0].step(compute))


@action
def surgery(run: Run, how: str, *words: str) -> None:
    """PCGrad: the gradients of two losses, which are kept as `references` or `clones`, projected on one another."""
    take, _ = _split(words)
    found = []
    for _ in range(2):
        run.model.zero_grad()
        loss = run.loss(take)
        run.backward(loss)
        run.see("loss of surgery", float(loss))
        found.append(
            [
                None if param.grad is None else param.grad.clone() if how == "clones" else param.grad
                for param in run.parameters()
            ]
        )
    for param, first, second in zip(run.parameters(), *found, strict=True):
        if first is not None and second is not None:
            conflict = torch.clamp((first * second).sum() / (second.square().sum() + 1e-12), max=0.0)
            param.grad = first - conflict * second + second


@action
def sam(run: Run, *words: str) -> None:
    """Sharpness-aware minimisation: the gradient at parameters that are moved along the gradient, and moved back."""
    take, _ = _split(words)
    run.model.zero_grad()
    run.backward(run.loss(take))
    moved: list[tuple[nn.Parameter, torch.Tensor]] = []
    with torch.no_grad():
        for param in run.with_gradients():
            moved.append((param, param.grad * 0.05))
            param.add_(moved[-1][1])
    run.model.zero_grad()
    loss = run.loss(take)
    run.backward(loss)
    run.see("loss of SAM", float(loss))
    with torch.no_grad():
        for param, by in moved:
            param.sub_(by)


class Stumble(Exception):
    """What a script raises, and catches."""


def _stumbles(*_: object) -> None:
    raise Stumble


@action
def stumble(run: Run, where: str) -> None:
    """An error that the script catches, to go on: in the forward pass, at its end (when buffers have changed), of the loss, in
    the backward pass ahead of all gradients, in a hook ahead of the step or behind it, or of torch, for a rate that is none.
    """
    if where in ("forward", "forward_end"):
        modules = [module for module in run.model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        module = next(run.model.children()) if where == "forward" else modules[-1]
        removed = module.register_forward_hook(_stumbles)
        with contextlib.suppress(Stumble):
            run.loss()
        removed.remove()
    elif where == "loss":
        with contextlib.suppress(Stumble):
            _stumbles(run.loss())
    elif where == "backward":
        loss = run.loss()
        loss.register_hook(_stumbles)
        with contextlib.suppress(Stumble):
            run.backward(loss)
    elif where == "rate":  # torch refuses it in the middle of a step, once it has come to the last group
        for optimizer in run.optimizers:
            group = optimizer.param_groups[-1]
            kept, group["lr"] = group["lr"], None
            with contextlib.suppress(TypeError, ValueError, RuntimeError):
                optimizer.step()
            group["lr"] = kept
    else:
        for optimizer in run.optimizers:
            register = optimizer.register_step_pre_hook if where == "step_pre" else optimizer.register_step_post_hook
            removed = register(_stumbles)
            with contextlib.suppress(Stumble):
                optimizer.step()
            removed.remove()


@action
def metric(run: Run) -> None:
    """A sum over ranks that the script makes itself."""
    value = torch.tensor([float(run.rank + 1)])
    dist.all_reduce(value)
    run.see("metric", value)


@action
def barrier(run: Run) -> None:
    dist.barrier()
