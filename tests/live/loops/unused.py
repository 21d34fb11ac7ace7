"""Accumulation, kept gradients and frozen parts where some parameters are not used: experts, heads, dropped layers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.live.loops.job import HELD, STEPS, Job, Mlp, adam, loop, momentum
from tests.live.loops.parts import UNUSED, Branches


class Experts(nn.Module):
    """A trunk, three experts of which a pass takes one, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(12, 50)
        self.experts = nn.ModuleList(nn.Linear(50, 50) for _ in range(3))
        self.head = nn.Linear(50, 6)
        self.taken = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.trunk(x))
        return self.head(x + torch.tanh(self.experts[self.taken](x)))

    batch = staticmethod(Mlp.batch)


class Heads(nn.Module):
    """A trunk and three heads of which a pass takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(50, 6) for _ in range(3))
        self.taken = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads[self.taken](self.trunk(x))

    batch = staticmethod(Mlp.batch)


def _passes(job: Job, taken: Sequence[Any], no_sync: bool = True) -> None:
    """A backward pass for each part `taken`; the last of them is summed, or (without `no_sync`) each."""
    for index, part in enumerate(taken):
        job.model.taken = part
        if no_sync and index < len(taken) - 1:
            with job.no_sync():
                job.backward()
        else:
            job.backward()


# -- micro-steps that do not use everything ------------------------------------------------------------------


@loop(model=Experts, ddp=UNUSED, defers=None)
def an_expert_a_micro_step(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        _passes(job, [(step + part) % 3 for part in range(3)])
        job.optimizer.step()


@loop(model=Experts, optimizer=adam, ddp=UNUSED, defers=None)
def an_expert_a_micro_step_and_gradients_zeroed_in_place(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad(set_to_none=False)
        _passes(job, [(step + part) % 3 for part in range(4)])
        job.optimizer.step()


@loop(model=Experts, ddp=UNUSED, defers=None)
def an_expert_a_micro_step_and_another_on_each_rank(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        _passes(job, [(step + part + job.rank) % 3 for part in range(3)])
        job.optimizer.step()


@loop(model=Experts, ddp=UNUSED, defers=None)
def an_expert_a_micro_step_each_of_which_is_summed(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad(set_to_none=step % 2 == 0)
        _passes(job, [(step + part) % 3 for part in range(2)], no_sync=False)
        job.optimizer.step()


@loop(model=Branches, ddp=UNUSED, defers=None)
def the_last_micro_step_leaves_a_branch_out(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        _passes(job, [("left", "right"), ("left",)])
        job.optimizer.step()


@loop(model=Branches, ddp=UNUSED, defers=None)
def the_last_micro_step_leaves_a_branch_out_on_one_rank(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        _passes(job, [("left", "right"), ("left",) if job.rank else ("left", "right")])
        job.optimizer.step()


@loop(model=Branches, ddp=UNUSED, defers=None)
def the_first_micro_step_leaves_a_branch_out(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad(set_to_none=step != 3)
        _passes(job, [("left",), ("left", "right"), ("right", "left")])
        job.optimizer.step()


@loop(model=Branches, optimizer=adam, ddp=UNUSED, defers=None)
def a_branch_used_by_one_rank_in_one_micro_step_only(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        first = ("left", "right") if job.rank == step % 2 else ("left",)
        _passes(job, [first, ("left",), ("left",)])
        job.optimizer.step()


@loop(model=Branches, ddp=UNUSED, defers=None)
def a_shorter_accumulation_at_the_end_of_each_epoch(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        _passes(job, [("right",)] if step % 3 == 2 else [("left", "right"), ("left",), ("left", "right")])
        job.optimizer.step()


@loop(model=Branches, ddp=UNUSED, defers=None)
def local_steps_between_steps_that_are_summed(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad(set_to_none=False)
        job.model.taken = ("left",) if step % 3 else ("left", "right")
        with job.no_sync() if step % 2 else contextlib.nullcontext():
            job.backward()
        job.optimizer.step()


# -- several heads -----------------------------------------------------------------------------------------


@loop(model=Heads, ddp=UNUSED, defers=None)
def two_heads_in_two_backward_passes(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        _passes(job, [step % 3, (step + 1) % 3], no_sync=False)
        job.optimizer.step()


@loop(model=Heads, ddp=UNUSED, defers=None)
def two_heads_of_which_the_last_pass_is_summed(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        _passes(job, [0, 1])
        job.optimizer.step()


@loop(model=Heads, ddp=UNUSED, defers=None)
def three_losses_stepped_one_by_one(job: Job) -> None:
    for _ in range(3):
        for head in range(3):
            job.optimizer.zero_grad()
            _passes(job, [head])
            job.optimizer.step()


def _one_each(model: nn.Module) -> list[torch.optim.Optimizer]:
    trunk = torch.optim.SGD(model.trunk.parameters(), lr=0.1, momentum=0.9)
    return [trunk, *(torch.optim.Adam(head.parameters(), lr=0.01) for head in model.heads)]


@loop(model=Heads, optimizer=_one_each, ddp=UNUSED, defers=None)
def three_losses_with_an_optimizer_each(job: Job) -> None:
    for step in range(STEPS):
        trunk, *heads = job.optimizer
        head = step % 3
        trunk.zero_grad()
        heads[head].zero_grad()
        _passes(job, [head])
        heads[head].step()
        trunk.step()


@loop(
    model=Heads,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
    ddp=UNUSED,
    defers=None,
)
def heads_in_turns_and_gradients_zeroed_in_place(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad(set_to_none=False)
        _passes(job, [(step + job.rank) % 3])
        job.optimizer.step()


@loop(model=Heads, ddp=UNUSED, defers=None)
def a_head_that_joins_late(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad(set_to_none=step != 5)
        _passes(job, [0, 2] if step >= 4 else [0, 1])
        job.optimizer.step()


# -- gradients that stay -------------------------------------------------------------------------------------


@loop(model=Branches, ddp=UNUSED, defers=None)
def gradients_never_zeroed_and_branches_in_turns(job: Job) -> None:
    for step in range(STEPS):
        _passes(job, [("left",) if step % 2 else ("right",)])
        job.optimizer.step()


@loop(model=Branches, ddp=UNUSED, defers=None)
def gradients_never_zeroed_and_a_branch_of_its_own_on_each_rank(job: Job) -> None:
    for step in range(STEPS):
        _passes(job, [("left",) if (step + job.rank) % 2 else ("right",)])
        job.optimizer.step()


@loop(model=Branches, ddp=UNUSED, defers=None)
def gradients_zeroed_every_third_step(job: Job) -> None:
    for step in range(STEPS):
        if step % 3 == 0:
            job.optimizer.zero_grad()
        _passes(job, [("left", "right") if step % 2 else ("left",)])
        job.optimizer.step()


@loop(model=Branches, ddp=UNUSED, defers=None)
def kept_gradients_of_unused_parts_are_seen(job: Job) -> None:
    for step in range(STEPS):
        if step % 2 == 0:
            job.optimizer.zero_grad(set_to_none=False)
        _passes(job, [("left", "right") if step % 2 else ("right",)])
        job.optimizer.step()
        for name, param in job.model.named_parameters():
            job.see(f"gradient of {name}", torch.zeros(1) if param.grad is None else param.grad)


@loop(model=Branches, ddp=UNUSED, defers=False, says="reads gradients")
def clipping_with_kept_gradients_of_unused_parts(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad(set_to_none=False)
        _passes(job, [("left", "right"), ("left",) if step % 2 else ("right",)])
        job.see("norm", nn.utils.clip_grad_norm_(job.model.parameters(), 0.1))
        job.optimizer.step()


# -- frozen and unfrozen -------------------------------------------------------------------------------------


def _freeze_in_the_middle(job: Job, zero_grad: Any) -> None:
    for step in range(STEPS + 1):
        if step in (3, 6):
            job.model.layers[1].requires_grad_(step == 6)
        zero_grad()
        job.backward()
        job.optimizer.step()


@loop(ddp=UNUSED, defers=None)
def a_part_frozen_for_a_while(job: Job) -> None:
    _freeze_in_the_middle(job, job.optimizer.zero_grad)


@loop(ddp=UNUSED, defers=None, says=None)
def a_part_frozen_for_a_while_with_its_gradient_zeroed_in_place(job: Job) -> None:
    _freeze_in_the_middle(job, lambda: job.optimizer.zero_grad(set_to_none=False))


@loop(ddp=UNUSED, defers=None)
def a_part_frozen_for_a_while_with_its_gradient_kept(job: Job) -> None:
    _freeze_in_the_middle(job, lambda: None)


@loop(model=Heads, ddp=UNUSED, defers=None)
def a_trunk_frozen_while_a_head_warms_up(job: Job) -> None:
    for step in range(STEPS):
        job.model.trunk.requires_grad_(step % 3 != 1)
        job.optimizer.zero_grad(set_to_none=step % 2 == 0)
        _passes(job, [0, 1])
        job.optimizer.step()


@loop(ddp=UNUSED, defers=None)
def a_part_frozen_between_forward_and_backward(job: Job) -> None:
    for step in range(STEPS + 1):
        part = job.model.layers[step % 3]
        job.optimizer.zero_grad()
        loss = job.loss()
        part.requires_grad_(step < 3 or (step == 5 and job.rank == 1))
        loss.backward()
        job.see("gradients", sum(param.grad is None for param in job.model.parameters()))
        job.optimizer.step()
        part.requires_grad_(True)


@loop(says=HELD)
def a_part_frozen_between_backward_and_step_whose_graph_is_kept(job: Job) -> None:
    """Autograd refers to its weight, and makes no node for it."""
    part = job.model.layers[1]
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        loss = job.loss()
        loss.backward(retain_graph=True)
        part.requires_grad_(False)
        job.optimizer.step()
        part.requires_grad_(True)
        job.see("loss", loss)


class FrozenAtFirst(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)


@loop(model=FrozenAtFirst, refused="was frozen at attach and is trained now")
def a_part_frozen_at_attach_and_trained_later(job: Job) -> None:
    for step in range(STEPS):
        job.model.layers[1].requires_grad_(step >= 4)
        job.step()


# -- dropped layers ------------------------------------------------------------------------------------------


class LayerDrop(Mlp):
    """Stochastic depth: the layers in the middle are left out at random, by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.Linear(40, 40)
        self.layers[2] = nn.Linear(40, 40)
        self.layers[3] = nn.Linear(40, 6)
        self.drawn = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:-1]:
            if torch.rand(1, generator=self.drawn) < 0.5:
                x = x + torch.tanh(layer(x))
        return self.layers[-1](x)


@loop(model=LayerDrop, ddp=UNUSED, defers=None)
def layer_drop_alike_on_all_ranks(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad(set_to_none=step % 2 == 0)
        job.backward()
        job.optimizer.step()


@loop(model=LayerDrop, optimizer=adam, ddp=UNUSED, defers=None)
def layer_drop_of_its_own_on_each_rank_under_accumulation(job: Job) -> None:
    job.model.drawn.manual_seed(job.rank)
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        with job.no_sync():
            job.backward()
            job.backward()
        job.backward()
        job.optimizer.step()


# -- two networks in one model -------------------------------------------------------------------------------


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(12, 50), nn.Tanh(), nn.Linear(50, 12))
        self.critic = nn.Sequential(nn.Linear(12, 50), nn.Tanh(), nn.Linear(50, 1))

    def forward(self, noise: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        made = self.generator(noise)
        return self.critic(made if real is None else torch.cat([made.detach(), real]))


def _two_networks(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [momentum(model.generator), torch.optim.Adam(model.critic.parameters(), lr=0.01)]


@loop(model=Gan, optimizer=_two_networks, ddp=UNUSED, defers=None)
def a_gan_that_freezes_its_critic_in_turns(job: Job) -> None:
    generator, critic = job.optimizer
    signs = torch.tensor([1.0] * 8 + [-1.0] * 8).unsqueeze(1)
    for _ in range(4):
        noise, real = torch.randn(2, 8, 12, generator=job.generator)
        job.model.critic.requires_grad_(True)
        critic.zero_grad()
        loss = F.softplus(signs * job.call(noise, real)).mean()
        job.see("loss of the critic", loss)
        loss.backward()
        critic.step()
        job.model.critic.requires_grad_(False)
        generator.zero_grad()
        loss = F.softplus(-job.call(noise)).mean()
        job.see("loss of the generator", loss)
        loss.backward()
        generator.step()


@loop(model=Gan, optimizer=_two_networks, ddp=UNUSED, defers=None)
def a_gan_whose_optimizers_are_toggled(job: Job) -> None:
    """As Lightning's `toggle_optimizer`: what the other optimizer updates requires no gradient meanwhile."""
    generator, critic = job.optimizer
    signs = torch.tensor([1.0] * 8 + [-1.0] * 8).unsqueeze(1)

    def toggled(module: nn.Module, requires_grad: bool) -> None:
        for param in module.parameters():
            param.requires_grad = requires_grad

    for _ in range(5):
        noise, real = torch.randn(2, 8, 12, generator=job.generator)
        toggled(job.model.critic, False)
        loss = F.softplus(-job.call(noise)).mean()
        job.see("loss of the generator", loss)
        loss.backward()
        generator.step()
        generator.zero_grad()
        toggled(job.model.critic, True)
        toggled(job.model.generator, False)
        loss = F.softplus(signs * job.call(noise, real)).mean()
        job.see("loss of the critic", loss)
        loss.backward()
        critic.step()
        critic.zero_grad()
        toggled(job.model.generator, True)
