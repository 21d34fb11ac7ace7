"""Gradients that the script keeps beyond the step, or lays out in memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from tests.live.loops.job import SHARED, STEPS, Job, Mlp, loop

READ = "reads gradients"


class KeptByHooks(Mlp):
    """Keeps something of each gradient, from a hook on the parameter that is there before the model is wrapped."""

    def __init__(self, keep: Callable[[torch.Tensor], Any], after: bool = False) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {}
        for name, param in self.named_parameters():
            if after:
                param.register_post_accumulate_grad_hook(lambda param, name=name: self.kept.update({name: keep(param.grad)}))
            else:
                param.register_hook(lambda gradient, name=name: self.kept.update({name: keep(gradient)}))


def _seen_by_hooks(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        job.see("kept", dict(job.model.kept))
        job.optimizer.step()


@loop(model=partial(KeptByHooks, lambda gradient: gradient.view(-1)), defers=None, says=SHARED)
def views_of_gradients_kept_by_hooks(job: Job) -> None:
    _seen_by_hooks(job)


@loop(model=partial(KeptByHooks, lambda gradient: gradient.data), defers=None, says=SHARED)
def data_of_gradients_kept_by_hooks(job: Job) -> None:
    _seen_by_hooks(job)


@loop(model=partial(KeptByHooks, lambda gradient: gradient, after=True), defers=None, says=SHARED)
def gradients_kept_by_hooks_behind_them(job: Job) -> None:
    _seen_by_hooks(job)


# -- kept ----------------------------------------------------------------------------------------------------


def _keep(job: Job, keep: Callable[[nn.Parameter], Any], set_to_none: bool = True) -> None:
    """Something of each gradient is kept in each step, and all that was kept is seen in each step and in the end."""
    kept: list[Any] = []
    for _ in range(STEPS):
        job.optimizer.zero_grad(set_to_none=set_to_none)
        job.backward()
        kept.append([keep(param) for param in job.model.parameters()])
        job.optimizer.step()
        _see_all(job, kept)
    _see_all(job, kept)


def _see_all(job: Job, kept: Iterable[Any]) -> None:
    for step, values in enumerate(kept):
        job.see(f"kept in {step}", torch.cat([torch.as_tensor(value).detach().reshape(-1) for value in values]))


@loop(defers=None)
def gradients_kept(job: Job) -> None:
    _keep(job, lambda param: param.grad)


@loop(defers=None, says=SHARED)
def gradients_kept_and_zeroed_in_place(job: Job) -> None:
    _keep(job, lambda param: param.grad, set_to_none=False)


@loop(defers=None, says=READ)
def gradients_kept_detached(job: Job) -> None:
    _keep(job, lambda param: param.grad.detach())


@loop(defers=None, says=READ)
def views_of_gradients_kept(job: Job) -> None:
    _keep(job, lambda param: param.grad.view(-1)[:5])


@loop(defers=None, says=READ)
def numpy_views_of_gradients_kept(job: Job) -> None:
    _keep(job, lambda param: param.grad.numpy())


@loop(defers=None, says=READ)
def copies_of_gradients_kept(job: Job) -> None:
    _keep(job, lambda param: param.grad.clone())


@loop(defers=None, says=None)
def one_gradient_taken_once_and_read_in_each_step(job: Job) -> None:
    job.backward()
    gradient = job.model.layers[1].weight.grad
    for _ in range(STEPS):
        job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=False)
        job.see("zeroed", gradient)
        job.backward()
        job.see("gradient", gradient)


@loop(defers=False, says=READ)
def cosine_to_the_gradient_of_the_step_before(job: Job) -> None:
    before: list[torch.Tensor] = []
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        gradients = [param.grad for param in job.model.parameters()]
        for ours, theirs in zip(gradients, before, strict=False):
            job.see("cosine", F.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0))
        before = gradients
        job.optimizer.step()


# -- in one flat buffer of the script ------------------------------------------------------------------------


def _flat_gradients(job: Job) -> torch.Tensor:
    """Every gradient is a view of one flat buffer from now on."""
    params = list(job.model.parameters())
    flat = torch.zeros(sum(param.numel() for param in params))
    for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.grad = part.view_as(param)
    return flat


@loop(defers=None, says=SHARED)
def a_flat_buffer_of_gradients(job: Job) -> None:
    flat = _flat_gradients(job)
    for _ in range(STEPS):
        flat.zero_()
        job.backward()
        job.optimizer.step()
        job.see("flat", flat)


@loop(defers=None, says=SHARED)
def a_flat_buffer_of_gradients_read_after_backward(job: Job) -> None:
    flat = _flat_gradients(job)
    for _ in range(STEPS):
        flat.zero_()
        job.backward()
        job.see("norm", flat.norm())
        job.optimizer.step()


@loop(defers=None, says=SHARED)
def a_flat_buffer_of_gradients_clipped(job: Job) -> None:
    flat = _flat_gradients(job)
    for _ in range(STEPS):
        flat.zero_()
        job.backward()
        flat.mul_(torch.clamp(0.1 / (flat.norm() + 1e-6), max=1.0))
        job.optimizer.step()


@loop(defers=None, says=SHARED)
def a_flat_buffer_of_gradients_under_accumulation(job: Job) -> None:
    flat = _flat_gradients(job)
    for _ in range(STEPS):
        job.optimizer.zero_grad(set_to_none=False)
        with job.no_sync():
            job.backward()
        job.backward()
        flat.mul_(0.5)
        job.optimizer.step()


# -- two losses ----------------------------------------------------------------------------------------------


def _surgery(job: Job, take: Callable[[nn.Parameter], torch.Tensor], set_to_none: bool) -> None:
    """PCGrad: of two summed losses, what is against the first loss is taken out of the second one's gradient."""
    params = list(job.model.parameters())
    for _ in range(STEPS):
        both = []
        for _ in range(2):
            job.optimizer.zero_grad(set_to_none=set_to_none)
            job.backward()
            both.append([take(param) for param in params])
        job.optimizer.zero_grad(set_to_none=set_to_none)
        for param, first, second in zip(params, *both, strict=True):
            dot = (first * second).sum()
            param.grad = first + (second - first * (dot / first.square().sum()) if dot < 0 else second)
            job.see("dot", dot)
        job.optimizer.step()


@loop(defers=None, says=READ)
def surgery_on_copies_of_two_gradients(job: Job) -> None:
    _surgery(job, lambda param: param.grad.clone(), set_to_none=False)


@loop(defers=None, says=READ)
def surgery_on_two_gradients(job: Job) -> None:
    _surgery(job, lambda param: param.grad, set_to_none=True)


@loop(defers=None, says=READ)
def the_gradient_of_one_loss_taken_out_of_the_sum_of_two(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        first = [param.grad.clone() for param in job.model.parameters()]
        job.backward()  # onto it
        for param, gradient in zip(job.model.parameters(), first, strict=True):
            param.grad.sub_(gradient, alpha=0.5)
        job.optimizer.step()


@loop(defers=None, says=READ)
def a_local_pass_after_the_summed_one(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        with job.no_sync():
            job.backward()
        job.optimizer.step()


def _tied(job: Job) -> list[nn.Parameter]:
    return [*job.model.parameters(), job.model.layers[0].weight]


@loop(defers=None, says=None)
def gradients_marked_by_an_attribute(job: Job) -> None:
    """Each is scaled once, however often the list has it."""
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        for param in _tied(job):
            if not hasattr(param.grad, "scaled"):
                param.grad.mul_(0.5)
                param.grad.scaled = True  # type: ignore[attr-defined]
        job.optimizer.step()


@loop(defers=None, says=None)
def gradients_marked_by_weak_references(job: Job) -> None:
    scaled = WeakIdKeyDictionary()
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        for param in _tied(job):
            if param.grad not in scaled:
                param.grad.mul_(0.5)
                scaled[param.grad] = True
        job.optimizer.step()


@loop(defers=None, says=None)
def gradients_that_are_told_to_require_one(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        for param in job.model.parameters():
            job.see("requires a gradient", param.grad.requires_grad)
        if step % 2:
            job.model.layers[1].weight.grad.requires_grad_()
            job.model.layers[2].bias.grad.requires_grad = True
        for param in job.model.parameters():
            job.see("requires one before the step", param.grad.requires_grad)
        job.optimizer.step()
