"""Hyper-parameters that change, and optimizers of every kind."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections import deque
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.live.loops.job import STEPS, Job, adam, loop, momentum

# -- hyper-parameters that change --------------------------------------------------------------------------


@loop()
def step_lr(job: Job) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, step_size=2, gamma=0.3)
    for _ in range(STEPS):
        job.step()
        scheduler.step()


@loop(optimizer=adam)
def one_cycle_lr_changes_momentum_too(job: Job) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(job.optimizer, max_lr=0.05, total_steps=STEPS)
    for _ in range(STEPS):
        job.step()
        scheduler.step()


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    last = list(model.layers[-1].parameters())
    rest = list(model.layers[:-1].parameters())
    return torch.optim.AdamW([{"params": rest, "lr": 0.01}, {"params": last, "lr": 0.05, "weight_decay": 0.1}])


@loop(optimizer=_two_groups)
def parameter_groups_with_rates_of_their_own(job: Job) -> None:
    for step in range(STEPS):
        job.step()
        job.optimizer.param_groups[1]["lr"] = 0.05 / (step + 1)


@loop(optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.02), foreach=False))
def a_rate_that_is_a_tensor_changed_in_place(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
        job.optimizer.param_groups[0]["lr"].mul_(0.7)


def _two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(model.layers[:2].parameters(), lr=0.1, momentum=0.5),
        torch.optim.Adam(model.layers[2:].parameters(), lr=0.01),
    ]


@loop(optimizer=_two_optimizers)
def two_optimizers(job: Job) -> None:
    for _ in range(STEPS):
        for optimizer in job.optimizer:
            optimizer.zero_grad()
        job.loss().backward()
        for optimizer in job.optimizer:
            optimizer.step()


@loop(optimizer=lambda model: [momentum(model), torch.optim.Adam(model.layers[1:3].parameters(), lr=0.01)])
def two_optimizers_that_share_parameters(job: Job) -> None:
    for step in range(STEPS):
        job.model.zero_grad()
        job.backward()
        for optimizer in job.optimizer if step % 2 else reversed(job.optimizer):
            optimizer.step()


@loop(defers=False, says="is compiled: it keeps the barrier")
def a_compiled_step(job: Job) -> None:
    torch.compiler.reset()
    step = torch.compile(lambda: job.optimizer.step(), backend="aot_eager")
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        step()


# -- optimizers that keep the barrier ----------------------------------------------------------------------


@loop(optimizer=lambda model: torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3), defers=False, says="LBFGS")
def lbfgs_with_a_closure(job: Job) -> None:
    for _ in range(3):
        x, y = job.batch()

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            job.optimizer.zero_grad()
            loss = F.cross_entropy(job.call(x), y)
            loss.backward()
            return loss

        job.see("loss", job.optimizer.step(closure))


def _whole_step(job: Job) -> Any:
    """A closure with all that comes before an update, as trainers pass it."""

    def closure() -> torch.Tensor:
        job.optimizer.zero_grad()
        loss = job.loss()
        loss.backward()
        return loss

    return closure


@loop()
def a_closure_that_is_run_once(job: Job) -> None:
    for step in range(STEPS):
        closure = _whole_step(job)
        job.see("loss", job.optimizer.step(closure) if step % 2 else job.optimizer.step(closure=closure))


@loop()
def no_closure_said_aloud(job: Job) -> None:
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        job.backward()
        job.optimizer.step(None)


class NormedSgd(torch.optim.Optimizer):
    """One that nobody knows: its updates depend on the norm over all gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.nn.utils.get_total_norm([param.grad for param in params])
        for param in params:
            param.add_(param.grad / norm, alpha=-0.1)
            self.state[param]["norm"] = norm


@loop(optimizer=lambda model: NormedSgd(model.parameters()), defers=False, says="the barrier is kept: NormedSgd is not known")
def an_optimizer_of_the_users_own(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


class OwnSgd(torch.optim.SGD):
    """Known by its user to update each parameter from its own gradient alone."""


@loop(
    optimizer=lambda model: OwnSgd(model.parameters(), lr=0.1, momentum=0.9),
    attach={"cross_barrier": True},
    says="verified 3 of 7 steps",
)
def an_optimizer_that_its_user_vouches_for(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


class _WithBases(ABC, torch.optim.Optimizer):
    """Libraries of optimizers derive theirs from such a class, whose objects Python lays out otherwise than torch's."""

    @abstractmethod
    def step(self, closure: Any = None) -> Any: ...


class SignSgd(_WithBases):
    """Keeps numbers and a queue in its state, and has an option `foreach` with a meaning of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "foreach": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["steps"] = state.get("steps", 0) + 1
                    state.setdefault("last", deque(maxlen=3)).append(param.grad.clone())
                    mean = torch.stack(list(state["last"])).mean(0)
                    param.add_(mean.sign(), alpha=-group["lr"] * (1 if group["foreach"] is None else 2))


@loop(optimizer=lambda model: SignSgd(model.parameters()), attach={"cross_barrier": True}, says="verified 3 of 7 steps")
def an_optimizer_with_several_bases(job: Job) -> None:
    for _ in range(STEPS):
        job.step()
    job.see("steps", torch.tensor([state["steps"] for state in job.optimizer.state.values()]))


def _with_tensors(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False)


@loop(optimizer=_with_tensors)
def betas_that_are_tensors_changed_in_place(job: Job) -> None:
    first, _ = job.optimizer.param_groups[0]["betas"]
    for _ in range(STEPS):
        job.step()
        first.mul_(0.98)


@loop(attach={"cross_barrier": False}, defers=False)
def the_barrier_kept_on_request(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


@loop(optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True))
def a_fused_optimizer(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


@loop(optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True, maximize=True, foreach=True))
def a_foreach_optimizer(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


# -- options and functions that a script replaces ----------------------------------------------------------


@loop()
def a_rate_in_an_array_changed_in_place(job: Job) -> None:
    rate = np.array(0.1)
    job.optimizer.param_groups[0]["lr"] = rate
    for _ in range(STEPS):
        job.step()
        rate *= 0.7


@loop(optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01, foreach=False))
def betas_in_a_list_of_tensors_changed_in_place(job: Job) -> None:
    betas = [torch.tensor(0.9), torch.tensor(0.99)]
    job.optimizer.param_groups[0]["betas"] = betas
    for _ in range(STEPS):
        job.step()
        for beta in betas:
            beta.mul_(0.9)


@loop(defers=False, says="a function that it calls")
def the_function_that_a_step_calls_replaced(job: Job) -> None:
    module = importlib.import_module("torch.optim.sgd")
    torchs = module.sgd

    def by_their_norm(params: Any, gradients: Any, *rest: Any, **options: Any) -> None:
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        torchs(params, [gradient / norm for gradient in gradients], *rest, **options)

    with patch.object(module, "sgd", by_their_norm):
        for _ in range(STEPS):
            job.step()
        for param in job.model.parameters():
            param.sum()  # no update is left for when the function is torch's again


@loop(defers=False, says="a function that it calls")
def a_method_that_a_step_calls_replaced(job: Job) -> None:
    torchs = job.optimizer._init_group

    def halved(group: Any, params: Any, gradients: Any, *rest: Any) -> Any:
        found = torchs(group, params, gradients, *rest)
        torch._foreach_mul_(gradients, 0.5)
        return found

    job.optimizer._init_group = halved
    for _ in range(STEPS):
        job.step()
