"""Gradients that the script writes to or replaces, gradients of other things, and optimizers that use them twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.live.loops.job import STEPS, Job, Mlp, adam, loop

READ = "reads gradients"


def _train(job: Job, after_backward: Callable[[nn.Parameter], Any]) -> None:
    """Steps in which something is done to each gradient before the optimizer uses it."""
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        for param in job.model.parameters():
            after_backward(param)
        job.optimizer.step()


# -- written to ----------------------------------------------------------------------------------------------


@loop(defers=False, says=READ)
def gradients_scaled_through_data(job: Job) -> None:
    _train(job, lambda param: param.grad.data.mul_(0.5))


@loop(defers=False, says=READ)
def gradients_whose_data_is_replaced(job: Job) -> None:
    def replace(param: nn.Parameter) -> None:
        param.grad.data = param.grad.data * 0.5

    _train(job, replace)


@loop(defers=False, says=READ)
def gradients_whose_memory_is_replaced(job: Job) -> None:
    _train(job, lambda param: param.grad.set_(torch.sign(param.grad) * 0.01))


@loop(defers=False, says=READ)
def gradients_with_noise(job: Job) -> None:
    noise = torch.Generator().manual_seed(11)
    _train(job, lambda param: param.grad.add_(torch.randn(param.shape, generator=noise), alpha=0.01))


@loop(defers=False, says=READ)
def gradients_centralised(job: Job) -> None:
    _train(job, lambda param: param.grad.sub_(param.grad.mean(dim=-1, keepdim=True)))


@loop(optimizer=adam, defers=False, says=READ)
def gradients_rounded_for_compression(job: Job) -> None:
    def compress(param: nn.Parameter) -> None:
        param.grad = param.grad.bfloat16().to(param.grad.dtype)

    _train(job, compress)


@loop()
def one_layer_with_smaller_gradients(job: Job) -> None:
    def scale(param: nn.Parameter) -> None:
        if any(param is of for of in job.model.layers[0].parameters()):
            param.grad *= 0.1

    _train(job, scale)


@loop(defers=False, says=READ)
def weight_decay_by_hand(job: Job) -> None:
    def decay(param: nn.Parameter) -> None:
        param.grad = param.grad.add(param.detach(), alpha=0.01)

    _train(job, decay)


@loop(defers=False, says=READ)
def gradients_of_a_regulariser_added_by_hand(job: Job) -> None:
    def regularise(param: nn.Parameter) -> None:
        param.grad += 0.01 * torch.sign(param.detach())

    _train(job, regularise)


@loop(defers=None)
def gradients_dropped_after_backward(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        for param in job.model.layers[step % 4].parameters():
            param.grad = None
        job.optimizer.step()


@loop(defers=False, says=READ)
def adaptive_gradient_clipping(job: Job) -> None:
    def clip(param: nn.Parameter) -> None:
        most = param.detach().norm(dim=-1, keepdim=True).clamp(min=1e-3) * 0.01
        norm = param.grad.norm(dim=-1, keepdim=True).clamp(min=1e-6)
        param.grad.copy_(torch.where(norm > most, param.grad * (most / norm), param.grad))

    _train(job, clip)


@loop(defers=False, says=READ)
def clipping_by_each_of_torchs_ways(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        params = list(job.model.parameters())
        if step % 3 == 2:
            norm = nn.utils.get_total_norm([param.grad for param in params])
            nn.utils.clip_grads_with_norm_(params, 0.1, norm)
        else:
            norm = nn.utils.clip_grad_norm_(params, 0.1, foreach=step % 3 == 0)
        job.see("norm", norm)
        job.optimizer.step()


@loop(defers=False, says=READ)
def gradients_scaled_all_at_once(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        gradients = [param.grad for param in job.model.parameters()]
        job.see("norms", torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, 0.5)
        job.optimizer.step()


@loop()
def gradients_zeroed_by_hand(job: Job) -> None:
    for step in range(STEPS):
        for param in job.model.parameters():
            if param.grad is not None:
                param.grad.detach_()
                (param.grad.data if step % 2 else param.grad).zero_()
        job.backward()
        job.optimizer.step()


@loop(defers=False, says=READ)
def histograms_of_gradients(job: Job) -> None:
    _train(job, lambda param: job.see("histogram", torch.histc(param.grad, bins=10, min=-0.1, max=0.1)))


@loop(defers=False, says=READ)
def an_average_of_gradients_added_to_them(job: Job) -> None:
    averages: dict[nn.Parameter, torch.Tensor] = {}

    def amplify(param: nn.Parameter) -> None:
        average = averages.setdefault(param, param.grad)  # the first is the gradient itself
        averages[param] = average * 0.9 + param.grad * 0.1
        param.grad = param.grad + averages[param]

    _train(job, amplify)


@loop(refused="before the backward pass has ended")
def a_gradient_read_inside_the_backward_pass(job: Job) -> None:
    first, last = job.model.layers[0].weight, job.model.layers[-1].weight
    first.register_post_accumulate_grad_hook(lambda _: job.see("last", last.grad.norm()))
    for _ in range(STEPS):
        job.step()


# -- gradients of other things -------------------------------------------------------------------------------


@loop(defers=None)
def a_saliency_pass_between_backward_and_step(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        with job.no_sync():
            job.backward()
        job.backward()
        x, y = job.batch()
        x.requires_grad_()
        job.see("saliency", torch.autograd.grad(F.cross_entropy(job.model(x), y), x)[0])
        job.optimizer.step()


@loop(defers=None)
def adversarial_inputs(job: Job) -> None:
    for _ in range(STEPS):
        x, y = job.batch()
        x.requires_grad_()
        F.cross_entropy(job.call(x), y).backward()
        x = (x + 0.1 * x.grad.sign()).detach()
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.call(x), y)
        job.see("loss", loss)
        loss.backward()
        job.optimizer.step()


@loop(defers=None)
def a_penalty_on_the_gradient_of_the_input(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        x, y = job.batch()
        x.requires_grad_()
        output = job.call(x)
        slope = torch.autograd.grad(output.sum(), x, create_graph=True)[0]
        loss = F.cross_entropy(output, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()
        job.see("loss", loss)
        loss.backward()
        job.optimizer.step()


@loop(defers=None)
def gradients_by_autograd_summed_by_hand(job: Job) -> None:
    params = list(job.model.parameters())
    for step in range(STEPS):
        job.optimizer.zero_grad()
        if step % 3 != 2:
            job.backward()
        else:
            for param, gradient in zip(params, torch.autograd.grad(job.loss(job.model), params), strict=True):
                torch.distributed.all_reduce(gradient)
                param.grad = gradient / 2
        job.optimizer.step()


# -- optimizers that use gradients twice ---------------------------------------------------------------------


@loop(defers=None, says=READ)
def sharpness_aware_minimisation(job: Job) -> None:
    params = list(job.model.parameters())
    for _ in range(STEPS):
        x, y = job.batch()
        job.optimizer.zero_grad()
        F.cross_entropy(job.call(x), y).backward()
        with torch.no_grad():
            norm = torch.stack([param.grad.norm() for param in params]).norm()
            moves = [param.grad * (0.05 / norm) for param in params]
            torch._foreach_add_(params, moves)
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.call(x), y)
        job.see("loss", loss)
        loss.backward()
        with torch.no_grad():
            torch._foreach_sub_(params, moves)
        job.optimizer.step()


@loop()
def lookahead(job: Job) -> None:
    slow = [param.detach().clone() for param in job.model.parameters()]
    for step in range(STEPS):
        job.step()
        if step % 3 == 2:
            with torch.no_grad():
                for ours, param in zip(slow, job.model.parameters(), strict=True):
                    ours.lerp_(param, 0.5)
                    param.copy_(ours)


class Brain(Mlp):
    def __init__(self) -> None:
        super().__init__(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.bfloat16()).float()


@loop(model=Brain, optimizer=lambda model: None, defers=False)
def gradients_moved_to_an_optimizer_of_masters(job: Job) -> None:
    params = list(job.model.parameters())
    masters = [param.detach().float() for param in params]
    job.optimizer = torch.optim.Adam(masters, lr=0.01)
    for _ in range(STEPS):
        job.model.zero_grad()
        job.backward()
        for master, param in zip(masters, params, strict=True):
            master.grad = param.grad.float()
        job.optimizer.step()
        torch._foreach_copy_([param.data for param in params], masters)


class Wide(nn.Module):
    """Layers that are too large for their gradients to wait for one another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(160, 160) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(8, 160, generator=generator), torch.randint(160, (8,), generator=generator)


def _set_by_a_hook(job: Job, gradient_of: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
    """A hook of another layer sets a gradient that is there already. DDP puts the sum there at the end of the pass."""
    last = job.model.layers[3].weight

    def hook(*_: object) -> None:
        last.grad = gradient_of(last)

    job.model.layers[1].register_full_backward_hook(hook)
    for _ in range(STEPS):
        job.step()


@loop(model=Wide, says=None, defers=None)
def a_gradient_dropped_inside_the_backward_pass(job: Job) -> None:
    _set_by_a_hook(job, lambda param: None)


@loop(model=Wide, says=None, defers=None)
def a_gradient_replaced_inside_the_backward_pass(job: Job) -> None:
    _set_by_a_hook(job, torch.ones_like)


def _exchanging(job: Job, exchange: Callable[[list[nn.Parameter]], None], by: int = 1) -> None:
    """A hook of one layer does something with gradients of others, which are there already."""
    biases = [layer.bias for layer in job.model.layers]
    biases[by].register_post_accumulate_grad_hook(lambda _: exchange(biases))
    for _ in range(STEPS):
        job.step()


@loop(model=Wide, says=None, defers=None)
def gradients_exchanged_by_a_hook(job: Job) -> None:
    def exchange(params: list[nn.Parameter]) -> None:
        params[2].grad, params[3].grad = params[3].grad, params[2].grad

    _exchanging(job, exchange)


@loop(model=Wide, says=None, defers=None)
def a_gradient_given_to_another_layer_by_a_hook(job: Job) -> None:
    def share(params: list[nn.Parameter]) -> None:
        params[2].grad = params[3].grad

    _exchanging(job, share)


@loop(model=Wide, says=None, defers=None)
def a_gradient_given_to_a_later_layer_by_its_own_hook(job: Job) -> None:
    def share(params: list[nn.Parameter]) -> None:
        params[3].grad = params[1].grad

    _exchanging(job, share)


@loop(model=Wide, says=None, defers=None)
def a_gradient_given_to_two_layers_by_a_hook(job: Job) -> None:
    def share(params: list[nn.Parameter]) -> None:
        params[2].grad = params[3].grad = params[1].grad

    _exchanging(job, share)


@loop(model=Wide, says=None, defers=None)
def a_gradient_given_to_three_layers_by_a_hook(job: Job) -> None:
    def share(params: list[nn.Parameter]) -> None:
        params[2].grad = params[1].grad = params[3].grad

    _exchanging(job, share, by=0)


@loop(model=Wide, says=None, defers=None)
def weights_gradients_exchanged_while_they_may_wait(job: Job) -> None:
    first, last = job.model.layers[2].weight, job.model.layers[3].weight

    def exchange(_: object) -> None:
        first.grad, last.grad = last.grad, first.grad

    job.model.layers[1].weight.register_post_accumulate_grad_hook(exchange)
    for _ in range(STEPS):
        job.step()


@loop(model=Wide, says=None, defers=None)
def a_gradient_replaced_of_a_parameter_with_a_hook(job: Job) -> None:
    """The parameter's hook, registered after a session's, does nothing."""
    job.model.layers[3].weight.register_post_accumulate_grad_hook(lambda param: None)
    _set_by_a_hook(job, torch.ones_like)


@loop()
def a_gradient_given_to_another_parameter_too(job: Job) -> None:
    """The optimizer reads it for both."""
    first, second = job.model.layers[1].bias, job.model.layers[2].bias
    for step in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        if step % 2:
            first.grad = second.grad
        job.optimizer.step()


@loop(model=Wide, says=None, defers=None)
def two_parameters_with_one_gradient(job: Job) -> None:
    """Nobody else refers to it."""
    first, second = job.model.layers[1].weight, job.model.layers[2].weight
    for step in range(STEPS):
        if step in (0, 3):
            first.grad = second.grad = torch.zeros_like(first)
        job.optimizer.zero_grad(set_to_none=False)
        job.backward()
        job.see("one gradient", first.grad is second.grad)
        job.optimizer.step()


@loop(model=Wide, says=None, defers=None)
def gradients_changed_by_hooks_on_their_nodes_in_the_first_iteration(job: Job) -> None:
    """DDP has copied them by then, and drops the change."""

    def triple(param: nn.Parameter) -> Any:
        def hook(*_: object) -> None:
            param.grad.mul_(3)

        return param.view_as(param).grad_fn.next_functions[0][0].register_hook(hook)

    handles = [triple(param) for param in job.model.parameters()]
    for step in range(STEPS):
        job.step()
        if step == 0:
            for handle in handles:
                handle.remove()
