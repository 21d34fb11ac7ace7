"""What is refused with a typed error: DDP raises there too, or trains on without a word what the script does not mean."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.live.loops.job import STEPS, Job, Mlp, loop

REPLACED = "was replaced since attach"


@loop(refused=REPLACED)
def a_state_loaded_by_assigning_it(job: Job) -> None:
    """DDP's module then has parameters that no optimizer has: nothing is trained from there on."""
    for step in range(STEPS):
        job.step()
        if step == 3:
            job.model.load_state_dict(copy.deepcopy(job.model.state_dict()), assign=True)


@loop(refused=REPLACED)
def a_parameter_replaced_by_another(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step == 3:
            job.model.layers[1].weight = nn.Parameter(job.model.layers[1].weight.detach() * 0.9)


@loop(refused="attach: close() the session before such a change")
def a_model_converted_for_good(job: Job) -> None:
    for step in range(STEPS):
        x, y = job.batch()
        job.optimizer.zero_grad()
        nn.functional.cross_entropy(job.call(x.to(job.model.layers[0].weight.dtype)).float(), y).backward()
        job.optimizer.step()
        if step == 3:
            job.model.bfloat16()


class Scaled(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))


@loop(model=Scaled, refused="buffer layers.0.scale is not where it was at attach")
def a_buffer_that_appears(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        if step == 3:
            job.model.layers[0].register_buffer("scale", torch.ones(1))


def _groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.1, momentum=0.9)


@loop(optimizer=_groups, refused=".step() raised")
def a_step_that_raises_in_its_second_group(job: Job) -> None:
    """DDP has updated the first group. Here that may be left until its gradients are summed, and so may the error."""
    for step in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        job.optimizer.param_groups[1]["lr"] = None if step == 4 else 0.1
        try:
            job.optimizer.step()
        except TypeError:
            job.see("after the error", job.model.layers[0].weight.sum())


@loop(refused="inside the backward pass")
def an_optimizer_that_steps_inside_backward(job: Job) -> None:
    for param in job.model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: job.optimizer.step())
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.loss().backward()


@loop(refused="the gradient of layers.1.bias")
def a_gradient_changed_by_a_hook_on_its_node(job: Job) -> None:
    """DDP has copied it, and drops the change; every rank would be told so alike."""
    bias = job.model.layers[1].bias
    node = bias.view_as(bias).grad_fn.next_functions[0][0]

    def halve(*_: object) -> None:
        bias.grad.mul_(0.5)

    for step in range(STEPS):
        if step == 4:
            node.register_hook(halve)
        job.step()
