"""Gradients: accumulated, kept, clipped, scaled, read, replaced."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tests.live.loops.job import STEPS, Job, Mlp, loop


@loop()
def accumulation_with_no_sync(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        with job.no_sync():
            job.loss().backward()
            job.loss().backward()
        job.loss().backward()
        job.optimizer.step()


@loop()
def accumulation_that_sums_each_pass(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        for _ in range(3):  # so that the plan is taken up in the middle of a step
            job.loss().backward()
        job.optimizer.step()


@loop()
def gradients_never_zeroed(job: Job) -> None:
    for _ in range(STEPS):
        job.loss().backward()
        job.optimizer.step()


@loop()
def zero_grad_in_place(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad(set_to_none=False)
        job.loss().backward()
        job.optimizer.step()


@loop()
def zero_grad_after_the_step(job: Job) -> None:
    for step in range(STEPS):
        job.loss().backward()
        job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=step % 2 == 0)


@loop()
def zero_grad_between_forward_and_backward(job: Job) -> None:
    for step in range(STEPS):
        loss = job.loss()
        job.model.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()
        job.optimizer.step()


READ = "reads gradients"


@loop(defers=False, says=READ)
def clip_grad_norm(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.loss().backward()
        job.see("norm", nn.utils.clip_grad_norm_(job.model.parameters(), 0.1))
        job.optimizer.step()


@loop(defers=True)
def clip_grad_value(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.loss().backward()
        nn.utils.clip_grad_value_(job.model.parameters(), 0.01)
        job.optimizer.step()


@loop(defers=False, says=READ)
def grad_scaler_with_a_step_of_infinities(job: Job) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for step in range(STEPS):
        job.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = job.loss()
        if step == 4 and job.rank == 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.step(job.optimizer)
        scaler.update()
        job.see("scale", scaler.get_scale())


@loop(defers=False, says=READ)
def grad_scaler_with_clipping(job: Job) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        scaler.scale(job.loss()).backward()
        scaler.unscale_(job.optimizer)
        job.see("norm", nn.utils.clip_grad_norm_(job.model.parameters(), 0.1))
        scaler.step(job.optimizer)
        scaler.update()


@loop()
def bfloat16_autocast(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = job.loss()
        loss.backward()
        job.optimizer.step()


class Several(list):  # type: ignore[type-arg]
    """A script's own list."""


class Pair(NamedTuple):
    """A script's own tuple."""

    first: torch.Tensor
    second: torch.Tensor


@loop(defers=False, says=READ)
def gradients_in_lists_and_tuples_of_the_scripts(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        gradients = [param.grad for param in job.model.parameters()]
        job.see("norms", torch.stack(torch._foreach_norm(Several(gradients))))
        job.see("together", torch.cat(Pair(gradients[1], gradients[3])))
        job.optimizer.step()


def _all_reduced(params: Sequence[nn.Parameter]) -> None:
    for work in [dist.all_reduce(param.grad, async_op=True) for param in params]:
        work.wait()


def _exchanged(params: Sequence[nn.Parameter]) -> None:
    other = 1 - dist.get_rank()
    for param in params:
        got = torch.empty_like(param)
        calls = [dist.P2POp(dist.isend, param.grad, other), dist.P2POp(dist.irecv, got, other)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        param.grad += got


def _reduced(params: Sequence[nn.Parameter]) -> None:
    for param in params:
        dist.reduce(param.grad, dst=0, async_op=True).wait()
        dist.broadcast(param.grad, 0)


@loop(defers=False, says=READ)
def gradients_in_collectives_of_the_scripts(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        (_all_reduced, _exchanged, _reduced)[step % 3](list(job.model.parameters()))
        job.see("gradients", {name: param.grad for name, param in job.model.named_parameters()})
        job.optimizer.step()


@loop(defers=False, says=READ)
def gradients_logged_before_the_step(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.loss().backward()
        for name, param in job.model.named_parameters():
            job.see(f"norm of {name}", param.grad.norm().item())
            job.see(f"{name}, sparse", param.grad.to_sparse().to_dense())
            job.see(f"{name}, a parameter", nn.Parameter(param.grad))
            job.see(f"{name} as numpy", param.grad.numpy().copy())
            job.see(f"{name} as a list", param.grad.tolist())
            job.see(f"{name} detached", param.grad.detach().abs().max())
            job.see(f"copy of {name}", copy.deepcopy(param.grad))
            assert f"{param.grad}".startswith("tensor(")
        job.optimizer.step()


@loop()
def one_gradient_logged_after_the_step(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.loss().backward()
        job.optimizer.step()
        job.see("gradient", job.model.layers[0].weight.grad.sum())
        job.see("parameter", job.model.layers[0].weight.detach().numpy().copy())


@loop(defers=False, says=READ)
def gradients_replaced_before_the_step(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.loss().backward()
        for param in job.model.parameters():
            param.grad = param.grad * 0.5
        job.optimizer.step()


@loop()
def hooks_on_gradients(job: Job) -> None:
    for param in job.model.parameters():
        param.register_hook(lambda gradient: gradient * 1.5)
    for _ in range(STEPS):
        job.step()


def _by_hand(model: nn.Module) -> None:
    return None


@loop(optimizer=_by_hand, defers=False)
def updates_by_hand_without_an_optimizer(job: Job) -> None:
    for _ in range(STEPS):
        for param in job.model.parameters():
            param.grad = None
        job.loss().backward()
        with torch.no_grad():
            for param in job.model.parameters():
                param.add_(param.grad, alpha=-0.1)


def _with_late_hooks(job: Job, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    def hook(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad = change(param.grad)

    job.step()  # a session was attached before it
    for param in job.model.layers[1].parameters():
        param.register_post_accumulate_grad_hook(hook)
    for _ in range(STEPS):
        job.step()


@loop()
def gradients_assigned_by_hooks_registered_late(job: Job) -> None:
    _with_late_hooks(job, lambda gradient: gradient * 0.5)


@loop()
def gradients_scaled_by_hooks_registered_late(job: Job) -> None:
    _with_late_hooks(job, lambda gradient: gradient.mul_(0.5))


@loop()
def gradients_read_by_hooks_registered_late(job: Job) -> None:
    def read(gradient: torch.Tensor) -> torch.Tensor:
        job.see("norm", gradient.norm())
        return gradient

    _with_late_hooks(job, read)


@loop()
def gradients_dropped_by_hooks_registered_late(job: Job) -> None:
    _with_late_hooks(job, lambda gradient: None)


class Dropping(Mlp):
    """Drops some of its gradients as soon as they come."""

    def __init__(self) -> None:
        super().__init__()
        for param in self.layers[1].parameters():
            param.register_post_accumulate_grad_hook(self._drop)

    @staticmethod
    def _drop(param: torch.Tensor) -> None:
        param.grad = None


@loop(model=Dropping, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))
def gradients_dropped_by_hooks_registered_early(job: Job) -> None:
    """DDP sums zeros, and weights decay."""
    for _ in range(STEPS):
        job.step()


@loop(says="registered during the backward pass")
def gradients_scaled_by_hooks_registered_in_the_backward_pass(job: Job) -> None:
    weight, handles = job.model.layers[1].weight, []

    def halve(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    def register(_: torch.Tensor) -> None:
        handles.append(weight.register_post_accumulate_grad_hook(halve))

    job.model.layers[3].weight.register_hook(register)
    for _ in range(STEPS):
        job.step()
        handles.pop().remove()


@loop(defers=False, says="in memory that the script holds too")
def gradients_in_arrays_of_numpy(job: Job) -> None:
    arrays = {name: param.detach().numpy() * 0 for name, param in job.model.named_parameters()}
    for name, param in job.model.named_parameters():
        param.grad = torch.from_numpy(arrays[name])
    for _ in range(STEPS):
        job.optimizer.zero_grad(set_to_none=False)
        job.loss().backward()
        for name, array in arrays.items():
            job.see(f"array of {name}", torch.from_numpy(array.copy()))
            array *= 0.5
        job.optimizer.step()
