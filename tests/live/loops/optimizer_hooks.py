"""Hooks of the optimizer, registered before attach and after it, and steps that the script wraps, repeats or leaves out."""

from __future__ import annotations

import contextlib
import copy
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

import gradlane
from tests.live.loops.job import STEPS, Job, adam, loop, momentum

READ = "reads gradients"


def _params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _after(hook: Callable[[Any], Any], make: Callable[[nn.Module], Any] = momentum) -> Callable[[nn.Module], Any]:
    """An optimizer that has `hook` behind each step before anything is attached to it."""

    def optimizer(model: nn.Module) -> Any:
        made = make(model)
        made.register_step_post_hook(lambda optimizer, args, kwargs: hook(optimizer))
        return made

    return optimizer


def _before(hook: Callable[[Any], Any], make: Callable[[nn.Module], Any] = momentum) -> Callable[[nn.Module], Any]:
    """One that has `hook` ahead of each step."""

    def optimizer(model: nn.Module) -> Any:
        made = make(model)
        made.register_step_pre_hook(lambda optimizer, args, kwargs: hook(optimizer))
        return made

    return optimizer


def _train(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


# -- behind each step ----------------------------------------------------------------------------------------


def _average(optimizer: Any) -> None:
    params = _params(optimizer)
    if not hasattr(optimizer, "averages"):
        optimizer.averages = [param.detach().clone() for param in params]
    torch._foreach_lerp_(optimizer.averages, [param.detach() for param in params], 0.1)


def _see_averages(job: Job) -> None:
    for average in job.optimizer.averages:
        job.see("average", average)


@loop(optimizer=_after(_average), defers=None)
def averages_in_a_post_hook_from_before_attach(job: Job) -> None:
    _train(job)
    _see_averages(job)


@loop(defers=None)
def averages_in_a_post_hook(job: Job) -> None:
    job.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: _average(optimizer))
    _train(job)
    _see_averages(job)


@torch.no_grad()
def _clamp(optimizer: Any) -> None:
    for param in _params(optimizer):
        param.clamp_(-0.1, 0.1)


@loop(optimizer=_after(_clamp), defers=None)
def weights_clamped_in_a_post_hook_from_before_attach(job: Job) -> None:
    _train(job)


@loop(defers=None)
def weights_clamped_in_a_post_hook(job: Job) -> None:
    job.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: _clamp(optimizer))
    _train(job)


def _normalise(optimizer: Any) -> None:
    for param in _params(optimizer):
        if param.dim() > 1:
            param.data.div_(param.data.norm(dim=1, keepdim=True))


@loop(optimizer=_after(_normalise, adam), defers=None)
def rows_of_unit_length_by_a_post_hook_from_before_attach(job: Job) -> None:
    _train(job)


def _note_momentum(optimizer: Any) -> None:
    norms = [optimizer.state[param]["momentum_buffer"].norm() for param in _params(optimizer)]
    optimizer.noted = [*getattr(optimizer, "noted", []), torch.stack(norms)]


@loop(optimizer=_after(_note_momentum), defers=None)
def momentum_noted_in_a_post_hook_from_before_attach(job: Job) -> None:
    _train(job)
    job.see("momentum", torch.stack(job.optimizer.noted))


@loop(defers=None)
def momentum_noted_in_a_post_hook(job: Job) -> None:
    job.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: _note_momentum(optimizer))
    _train(job)
    job.see("momentum", torch.stack(job.optimizer.noted))


def _save(optimizer: Any) -> None:
    optimizer.saved = [*getattr(optimizer, "saved", []), copy.deepcopy(optimizer.state_dict()["state"])]


def _see_saved(job: Job) -> None:
    for states in job.optimizer.saved:
        for state in states.values():
            job.see("saved", state)


@loop(optimizer=_after(_save), defers=None)
def a_checkpoint_in_a_post_hook_from_before_attach(job: Job) -> None:
    _train(job)
    _see_saved(job)


@loop(defers=None)
def a_checkpoint_in_a_post_hook(job: Job) -> None:
    job.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: _save(optimizer))
    models: list[Any] = []
    job.optimizer.register_step_post_hook(lambda *_: models.append(copy.deepcopy(job.model.state_dict())))
    _train(job)
    _see_saved(job)
    for model in models:
        job.see("model", model)


@loop(optimizer=_after(lambda optimizer: optimizer.zero_grad()), defers=None)
def zero_grad_in_a_post_hook_from_before_attach(job: Job) -> None:
    for _ in range(STEPS):
        job.backward()
        job.optimizer.step()


@loop(optimizer=_after(lambda optimizer: optimizer.zero_grad(set_to_none=False)), defers=None)
def zero_grad_in_place_in_a_post_hook_from_before_attach(job: Job) -> None:
    for _ in range(STEPS):
        job.backward()
        job.optimizer.step()


@loop(defers=None)
def zero_grad_in_a_post_hook(job: Job) -> None:
    job.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: optimizer.zero_grad(set_to_none=False))
    for _ in range(STEPS):
        job.backward()
        job.optimizer.step()


# -- ahead of each step --------------------------------------------------------------------------------------


def _clip(optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(_params(optimizer), 0.1)


@loop(optimizer=_before(_clip), defers=False, says=READ)
def clipping_in_a_pre_hook_from_before_attach(job: Job) -> None:
    _train(job)


@loop(defers=False, says=READ)
def clipping_in_a_pre_hook(job: Job) -> None:
    job.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: _clip(optimizer))
    _train(job)


@loop(defers=False, says="a step pre-hook runs after gradlane's")
def clipping_in_a_pre_hook_registered_through_the_class(job: Job) -> None:
    torch.optim.Optimizer.register_step_pre_hook(job.optimizer, lambda optimizer, args, kwargs: _clip(optimizer))
    _train(job)


class Counting(torch.optim.Optimizer):
    """Counts its own steps; each update is of one parameter's gradient and state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    mean.lerp_(param.grad, 0.1)
                    param.add_(mean / (1 - 0.9**self.steps), alpha=-group["lr"])


class Raising(torch.optim.SGD):
    """Raises in some steps, before it updates anything."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.raises = False

    def step(self, closure: Any = None) -> Any:
        if self.raises:
            raise ValueError("as the script's own check does")
        return super().step(closure)


def _raising(model: nn.Module) -> torch.optim.Optimizer:
    momentum(model)  # once there is one, torch runs hooks in `SGD.step` too
    return Raising(model.parameters())


@loop(optimizer=_raising, attach={"cross_barrier": True}, says=None)
def a_step_that_raises_and_is_called_again_or_left_out(job: Job) -> None:
    _raise_now_and_then(job)


@loop(optimizer=_raising, attach={"cross_barrier": True, "verify": gradlane.VerifyOptions(first=0, every=1)}, says=None)
def steps_that_raise_while_they_are_verified(job: Job) -> None:
    """The reference would raise, too."""
    _raise_now_and_then(job)


def _raise_now_and_then(job: Job) -> None:
    for step in range(STEPS + 6):
        job.optimizer.zero_grad()
        job.backward()
        job.optimizer.raises = step in (5, 6, 8, 11)
        try:
            job.optimizer.step()
        except ValueError:
            job.optimizer.raises = False
            if step in (6, 11):
                job.optimizer.step()
            job.see("after the error", job.model.layers[0].weight.sum())


@loop(optimizer=lambda model: Counting(model.parameters()), attach={"cross_barrier": True}, says="verified 3 of 7 steps")
def an_optimizer_that_counts_its_steps(job: Job) -> None:
    _train(job)
    job.see("steps", job.optimizer.steps)


def _adds_noise() -> Callable[[Any], None]:
    noise = torch.Generator()

    def add(optimizer: Any) -> None:
        noise.manual_seed(int(optimizer.param_groups[0].setdefault("calls", 0)))
        optimizer.param_groups[0]["calls"] += 1
        for param in _params(optimizer):
            param.grad.add_(torch.randn(param.shape, generator=noise), alpha=0.01)

    return add


@loop(optimizer=_before(_adds_noise()), defers=False, says=READ)
def noise_in_a_pre_hook_from_before_attach(job: Job) -> None:
    _train(job)


@loop(defers=False, says=READ)
def noise_in_a_pre_hook(job: Job) -> None:
    add = _adds_noise()
    job.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: add(optimizer))
    _train(job)


def _note_gradients(optimizer: Any) -> None:
    norms = torch.stack([param.grad.norm() for param in _params(optimizer)])
    optimizer.noted = [*getattr(optimizer, "noted", []), norms]


@loop(optimizer=_before(_note_gradients), defers=False, says=READ)
def gradients_noted_in_a_pre_hook_from_before_attach(job: Job) -> None:
    _train(job)
    job.see("norms", torch.stack(job.optimizer.noted))


@loop(defers=False, says=READ)
def gradients_noted_in_a_pre_hook(job: Job) -> None:
    job.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: _note_gradients(optimizer))
    _train(job)
    job.see("norms", torch.stack(job.optimizer.noted))


def _warm_up(optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    group["calls"] = group.get("calls", 0) + 1
    group["lr"] = 0.02 * group["calls"]


@loop(optimizer=_before(_warm_up), defers=None)
def a_rate_set_in_a_pre_hook_from_before_attach(job: Job) -> None:
    _train(job)


@loop(defers=None)
def a_rate_set_in_a_pre_hook(job: Job) -> None:
    job.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: _warm_up(optimizer))
    _train(job)


@loop(optimizer=adam, defers=None, says=READ)
def hooks_of_all_optimizers(job: Job) -> None:
    with contextlib.ExitStack() as registered:
        for handle in (
            register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _note_gradients(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _average(optimizer)),
        ):
            registered.callback(handle.remove)
        _train(job)
    job.see("norms", torch.stack(job.optimizer.noted))
    _see_averages(job)


# -- schedulers ----------------------------------------------------------------------------------------------


def _scheduled(model: nn.Module) -> Any:
    optimizer: Any = adam(model)
    optimizer.scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS)
    return optimizer


@loop(optimizer=_scheduled)
def a_scheduler_made_before_attach(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
        job.optimizer.scheduler.step()


@loop()
def a_rate_that_falls_on_a_plateau(job: Job) -> None:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(job.optimizer, factor=0.5, patience=0, threshold=0.1)
    for _ in range(STEPS):
        job.step()
        with torch.no_grad():
            scheduler.step(job.loss(job.model))
        job.see("rate", job.optimizer.param_groups[0]["lr"])


# -- steps ---------------------------------------------------------------------------------------------------


def _wrap(optimizer: Any) -> Any:
    """Its step also counts, and notes how far the first parameter has moved."""
    really = optimizer.step
    optimizer.moves = []

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        first = _params(self)[0]
        before = first.detach().clone()
        result = really(*args, **kwargs)
        self.moves.append((first.detach() - before).norm())
        return result

    optimizer.step = types.MethodType(step, optimizer)
    return optimizer


@loop(optimizer=lambda model: _wrap(momentum(model)))
def a_step_wrapped_before_attach(job: Job) -> None:
    _train(job)
    job.see("moves", torch.stack(job.optimizer.moves))


@loop()
def a_step_wrapped_after_attach(job: Job) -> None:
    _wrap(job.optimizer)
    _train(job)
    job.see("moves", torch.stack(job.optimizer.moves))


@loop(optimizer=adam)
def two_steps_with_one_gradient(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
        job.optimizer.step()


@loop(defers=None, says=READ)
def steps_left_out(job: Job) -> None:
    for step in range(STEPS):
        loss = job.loss() * (math.nan if step in (2, 5) and job.rank == 1 else 1.0)
        job.optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()
        if step not in (2, 5):  # as all ranks would find out of the loss
            job.optimizer.step()


@loop(defers=False, says=READ)
def steps_left_out_where_gradients_are_not_finite(job: Job) -> None:
    for step in range(STEPS):
        loss = job.loss() * (math.nan if step in (2, 5) and job.rank == 1 else 1.0)
        job.optimizer.zero_grad()
        loss.backward()
        finite = all(bool(torch.isfinite(param.grad).all()) for param in job.model.parameters())
        job.see("finite", finite)
        if finite:
            job.optimizer.step()


@loop(defers=None, says="SGD.step, or a function that it calls")
def step_of_the_class_replaced(job: Job) -> None:
    really = torch.optim.SGD.step

    def counts(optimizer: torch.optim.Optimizer, *args: Any) -> Any:
        job.see("gradients", sum(param.grad is not None for param in _params(optimizer)))
        return really(optimizer, *args)

    for step in range(STEPS):
        if step == 4:
            torch.optim.SGD.step = counts  # type: ignore[method-assign,assignment]
        try:
            job.step()
        finally:
            if step == STEPS - 1:
                torch.optim.SGD.step = really  # type: ignore[method-assign]


@loop(optimizer=adam, defers=False, says="inference_mode")
def steps_in_inference_mode(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.loss().backward()
        with torch.inference_mode():
            job.optimizer.step()


class _Shrinks(TorchFunctionMode):
    """Shrinks whatever is added to in place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.mul_(0.999) if func is torch.Tensor.add_ else result


@loop(defers=False, says="inside a mode that sees")
def steps_in_a_function_mode(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.loss().backward()
        with _Shrinks():
            job.optimizer.step()


@loop()
def steps_with_a_default_device(job: Job) -> None:
    with torch.device("cpu"):
        for _ in range(STEPS):
            job.step()
