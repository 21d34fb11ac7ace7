"""Parameters whose memory, dtype or layout the script changes in mid-run, or that it writes to past autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from tests.live.loops.job import HELD, STEPS, Job, Mlp, adam, loop, momentum
from tests.live.loops.parts import UNUSED, Branches
from tests.live.models import Convolutions

READ = "reads gradients"


def _after_steps(job: Job, change: Callable[[], Any], zero_grad: bool = False) -> None:
    """`change` after steps 3 and 5, with gradients there or without."""
    for step in range(STEPS + 1):
        job.step()
        if step in (3, 5):
            if zero_grad:
                job.optimizer.zero_grad()
            change()
            job.see("converted", torch.cat([param.detach().reshape(-1) for param in job.model.parameters()]))


def _before_steps(job: Job, change: Callable[[], Any]) -> None:
    """`change` between backward and step in steps 3 and 5."""
    for step in range(STEPS + 1):
        job.optimizer.zero_grad()
        job.backward()
        if step in (3, 5):
            change()
        job.optimizer.step()


# -- dtypes, for a save or an export -------------------------------------------------------------------------


def _save_in_half(job: Job) -> None:
    job.see("half", job.model.half().state_dict())
    job.model.float()
    job.wrap_again()


def _wrapped_again(job: Job, converted: nn.Module) -> None:
    """What is done once a model, or a part of it, is `converted`."""
    job.wrap_again()


@loop(defers=None)
def half_and_back_for_a_save(job: Job) -> None:
    _after_steps(job, lambda: _save_in_half(job))


@loop(defers=None)
def half_and_back_for_a_save_after_zero_grad(job: Job) -> None:
    _after_steps(job, lambda: _save_in_half(job), zero_grad=True)


@loop(defers=None, says=READ)
def half_and_back_between_backward_and_step(job: Job) -> None:
    _before_steps(job, lambda: _wrapped_again(job, job.model.half().float()))


@loop(optimizer=adam, defers=None)
def double_and_back_for_an_export(job: Job) -> None:
    def export() -> None:
        job.model.double()
        x = torch.ones(2, 12, dtype=torch.float64)
        job.see("in double", job.model.layers[0](x))
        job.model.float()
        job.wrap_again()

    _after_steps(job, export)


@loop(optimizer=adam, defers=None)
def double_and_back_for_an_export_after_zero_grad(job: Job) -> None:
    _after_steps(job, lambda: _wrapped_again(job, job.model.double().float()), zero_grad=True)


@loop(model=Convolutions, defers=None)
def bfloat16_and_back_for_an_evaluation(job: Job) -> None:
    def evaluate() -> None:
        job.model.bfloat16().eval()
        with torch.no_grad():
            x, y = job.batch()
            job.see("in bfloat16", F.cross_entropy(job.call(x.bfloat16()).float(), y))
        job.model.float().train()
        job.wrap_again()

    _after_steps(job, evaluate)


@loop(model=Convolutions, defers=None, says=READ)
def bfloat16_and_back_between_backward_and_step(job: Job) -> None:
    _before_steps(job, lambda: _wrapped_again(job, job.model.bfloat16().float()))


@loop()
def one_layer_in_half_and_back(job: Job) -> None:
    _after_steps(job, lambda: _wrapped_again(job, job.model.layers[1].half().float()))


# -- layouts and places --------------------------------------------------------------------------------------


def _to_channels_last(job: Job) -> None:
    job.model.to(memory_format=torch.channels_last)
    job.wrap_again()


@loop(model=Convolutions, defers=None)
def channels_last_from_the_middle_on(job: Job) -> None:
    _after_steps(job, lambda: _to_channels_last(job))


@loop(model=Convolutions, defers=None)
def channels_last_from_the_middle_on_after_zero_grad(job: Job) -> None:
    _after_steps(job, lambda: _to_channels_last(job), zero_grad=True)


@loop(model=Convolutions, optimizer=adam, defers=None, says=READ)
def channels_last_between_backward_and_step(job: Job) -> None:
    _before_steps(job, lambda: _to_channels_last(job))


@loop(defers=None)
def to_where_it_is_already(job: Job) -> None:
    _after_steps(job, lambda: job.model.cpu().float().to("cpu"))


@loop(defers=None, says=HELD)
def memory_shared_with_other_processes(job: Job) -> None:
    _after_steps(job, job.model.share_memory)


# -- other data ----------------------------------------------------------------------------------------------


def _each(job: Job, change: Callable[[nn.Parameter], Any]) -> None:
    _after_steps(job, lambda: [change(param) for param in job.model.parameters()])


@loop()
def data_replaced(job: Job) -> None:
    def replace(param: nn.Parameter) -> None:
        param.data = param.data * 0.9

    _each(job, replace)


@loop()
def data_replaced_by_what_is_another_layout(job: Job) -> None:
    def replace() -> None:
        for param in job.model.parameters():
            if param.dim() == 2:
                param.data = param.data.t().contiguous().t()
        job.wrap_again()

    _after_steps(job, replace)


@loop()
def data_replaced_between_backward_and_step(job: Job) -> None:
    def replace() -> None:
        for param in job.model.parameters():
            param.data = param.data.clone()

    _before_steps(job, replace)


@loop()
def data_overwritten(job: Job) -> None:
    start = [param.detach().clone() for param in job.model.parameters()]

    def rewind() -> None:
        for param, value in zip(job.model.parameters(), start, strict=True):
            param.data.copy_(value)

    _after_steps(job, rewind)


@loop()
def memory_replaced(job: Job) -> None:
    def replace() -> None:
        with torch.no_grad():
            for param in job.model.parameters():
                param.set_(param.detach() * 0.9)
        job.wrap_again()

    _after_steps(job, replace)


@loop()
def data_from_numpy(job: Job) -> None:
    def replace(param: nn.Parameter) -> None:
        param.data = torch.from_numpy(param.detach().numpy() * 0.5)

    _each(job, replace)


@loop()
def a_vector_put_into_the_parameters(job: Job) -> None:
    def shrink() -> None:
        flat = nn.utils.parameters_to_vector(job.model.parameters())
        nn.utils.vector_to_parameters(flat * 0.9, job.model.parameters())

    _after_steps(job, shrink)


@loop(says=HELD, defers=None)
def a_flat_buffer_of_parameters(job: Job) -> None:
    params = list(job.model.parameters())
    flat = torch.cat([param.detach().reshape(-1) for param in params])
    for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.data = part.view_as(param)
    for _ in range(STEPS):
        job.step()
        job.see("flat", flat)


@loop(optimizer=adam)
def a_layer_initialised_anew(job: Job) -> None:
    def reset() -> None:
        torch.manual_seed(5)
        nn.init.xavier_uniform_(job.model.layers[2].weight)
        nn.init.zeros_(job.model.layers[2].bias)
        job.model.layers[3].reset_parameters()

    _after_steps(job, reset)


@loop()
def weights_clamped_after_each_step(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
        for param in job.model.parameters():
            param.data.clamp_(-0.1, 0.1)


@loop()
def weights_rounded_after_each_step(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
        for param in job.model.parameters():
            param.data = param.data.half().float()


@loop()
def weights_made_orthogonal_after_each_step(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
        with torch.no_grad():
            job.model.layers[2].weight.copy_(torch.linalg.qr(job.model.layers[2].weight)[0])


@loop(ddp=UNUSED, defers=None)
def requires_grad_toggled_around_an_evaluation(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
        job.model.requires_grad_(False)
        job.see("evaluation", job.loss(job.model))
        job.model.requires_grad_(True)


# -- pruned, parametrized and tied ---------------------------------------------------------------------------


@loop(defers=None)
def pruned_in_the_middle(job: Job) -> None:
    for step in range(STEPS):
        if step in (3, 5):
            prune.l1_unstructured(job.model.layers[1], "weight", amount=0.3)
            prune.ln_structured(job.model.layers[2], "weight", amount=0.2, n=2, dim=0)
        job.step()


class Pruned(Mlp):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            prune.l1_unstructured(layer, "weight", amount=0.3)


@loop(model=Pruned)
def pruned_before_attach_and_more_later(job: Job) -> None:
    for step in range(STEPS):
        if step == 3:
            weights = [(layer, "weight") for layer in job.model.layers]
            prune.global_unstructured(weights, pruning_method=prune.L1Unstructured, amount=0.2)
        job.step()


@loop(model=Pruned, refused="is gone")
def pruning_made_permanent(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step == 3:
            for layer in job.model.layers:
                prune.remove(layer, "weight")
            job.wrap_again()


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.5

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2.0


@loop(defers=None)
def parametrized_in_the_middle(job: Job) -> None:
    for step in range(STEPS):
        if step == 3:
            parametrize.register_parametrization(job.model.layers[1], "weight", Halved())
            job.wrap_again()
        job.step()


class Parametrized(Mlp):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.layers[1], "weight", Halved())


@loop(model=Parametrized, defers=None)
def a_parametrization_removed(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step == 3:
            parametrize.remove_parametrizations(job.model.layers[1], "weight", leave_parametrized=True)
            job.wrap_again()


@loop(model=Branches, ddp=UNUSED, optimizer=momentum, defers=None)
def two_layers_tied_in_the_middle(job: Job) -> None:
    for step in range(STEPS):
        if step == 3:
            job.model.right.weight = job.model.left.weight
        job.step()
