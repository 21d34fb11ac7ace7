"""What ranks run under `verify`: training that is right, and training that somebody makes wrong."""

from __future__ import annotations

import itertools
import threading
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradlane
from gradlane.errors import JobError, UnsupportedError
from gradlane.live.session import guarded_params
from gradlane.live.session.torch_actions import TorchActions
from gradlane.live.session.verification import Verifier
from tests.live.cases import differences, train
from tests.live.loops import GIVEN, log_lines
from tests.live.models import MODELS, OPTIMIZERS
from tests.live.networks import counting_deferred_updates, network_until_awaited, slow_network

STEPS = 8


def _attached(rank: int, model: str, optimizer: str, device: str = "cpu", **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(7)
    net = MODELS[model]().to(device)
    opt = OPTIMIZERS[optimizer](net.parameters())
    policy = gradlane.policies.get("bytescheduler", partition_bytes=8000, credit_bytes=16000)
    session = gradlane.attach(net, opt, policy, network=GIVEN, profile_iterations=1, timeout=20, **options)
    return net, opt, session


def is_right(
    rank: int, world: int, model: str, optimizer: str, backend: str, first: int, every: int, **options: Any
) -> tuple[int, int, list[str]]:
    """How many updates were verified, how many were deferred, and what is said of it."""
    verify = gradlane.VerifyOptions(first=first, every=every)
    with slow_network(), counting_deferred_updates() as deferred, log_lines() as lines:
        net, opt, session = _attached(rank, model, optimizer, verify=verify, backend=backend, **options)
        with session:
            train(net, net, opt, net.batch, STEPS, rank)
            session.flush()
    return session._parts.verifier.verified.updates, sum(deferred), lines


def deferred_by_step(rank: int, world: int, every: int) -> tuple[list[int], str]:
    """How many updates each step has deferred where each iteration that `every` divides is verified, and the last line."""
    counts = []
    with network_until_awaited(), log_lines() as lines:
        torch.manual_seed(7)
        net = MODELS["convolutions"]()
        opt = OPTIMIZERS["sgd"](net.parameters())
        verify = gradlane.VerifyOptions(first=0, every=every)
        with gradlane.attach(net, opt, "p3", network=GIVEN, profile_iterations=1, verify=verify, timeout=20):
            for _ in range(STEPS):
                train(net, net, opt, net.batch, 1, rank)
                counts.append(sum(guarded_params.is_watched(param) for param in net.parameters()))
    return counts, lines[-1] if lines else ""


class _ByTheGlobalNorm(torch.optim.Optimizer):
    """Scales each update by the norm of all gradients: no update depends on its own gradient alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        params = [param for param in self.param_groups[0]["params"] if param.grad is not None]
        norm = sum((param.grad.square().sum() for param in params), torch.zeros(())).sqrt()
        for param in params:
            param.sub_(param.grad / norm, alpha=0.01)


def an_optimizer_needs_all_gradients(rank: int, world: int, verify: bool) -> str:
    """An optimizer of which the script says wrongly that each update depends on its own gradient alone."""
    with network_until_awaited():
        torch.manual_seed(7)
        net = MODELS["convolutions"]()
        opt = _ByTheGlobalNorm(net.parameters())
        session = gradlane.attach(
            net, opt, "p3", network=GIVEN, profile_iterations=1, cross_barrier=True, verify=verify, timeout=20
        )
        return _error_in(session, net, opt, rank)


class _Methods(torch.nn.Module):
    """A model that computes its loss in a method of its own, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(inputs).square().mean()
        return loss


def a_forward_pass_is_not_seen(rank: int, world: int, verify: bool) -> tuple[str, list[str]]:
    """Train by a method of a model with BatchNorm: rank 0's buffers are not sent. The error, and what is logged."""
    torch.manual_seed(7)
    net = _Methods()
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    with log_lines() as lines:
        try:
            with gradlane.attach(net, opt, "bytescheduler", network=GIVEN, verify=verify, timeout=20):
                for step in range(3):
                    opt.zero_grad()
                    net.loss(torch.randn(8, 4) + rank + step).backward()
                    opt.step()
        except JobError as error:
            return f"{type(error).__name__}: {error}", lines
    return "nothing", lines


def a_sum_is_damaged(rank: int, world: int, **options: Any) -> str:
    """On rank 1 an element of one sum is another than it should be, in the slot that updates are made from."""
    really = Verifier.arrived

    def damaged(self: Verifier, param: torch.nn.Parameter, slot: torch.Tensor) -> None:
        if self._iteration == 3 and rank == 1 and param is self._params[2]:
            slot.view(-1)[0] += 1
        really(self, param, slot)

    with patch.object(Verifier, "arrived", damaged):
        return _error(rank, **options)


def an_update_is_made_twice(rank: int, world: int) -> str:
    """On rank 0 an owed update is made twice, as it might be by a mistake in what is owed."""
    really = TorchActions.update

    def twice(self: TorchActions, step: Any, several: Any) -> None:
        if rank == 0 and self._driver.iteration >= 4:  # the first of them that leaves something to defer
            for tracked in several:
                tracked.param.grad = tracked.slot
            step.update([tracked.param for tracked in several])
        really(self, step, several)

    with (
        slow_network(),
        patch.object(TorchActions, "update", twice),
    ):
        return _error(rank)


class _Own(torch.optim.Optimizer):
    """Updates each parameter from its own gradient, after its closure."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=0.01)
        return loss


def one_of_two_optimizers_runs_a_closure(rank: int, world: int) -> int:
    """How many updates were verified where an optimizer runs a closure itself and another one has none."""
    torch.manual_seed(7)
    closed, other = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
    model = torch.nn.Sequential(closed, other)
    optimizers = [_Own(closed.parameters()), torch.optim.SGD(other.parameters(), lr=0.01, momentum=0.9)]
    verify = gradlane.VerifyOptions(first=STEPS, every=0)
    with gradlane.attach(
        model, optimizers, "bytescheduler", network=GIVEN, cross_barrier=True, verify=verify, timeout=20
    ) as session:
        for _ in range(STEPS):
            model.zero_grad()
            model(torch.randn(4, 16) + rank).square().mean().backward()
            optimizers[1].step()
            optimizers[0].step(lambda: 0.0)
    return session._parts.verifier.verified.updates


def _error(rank: int, **options: Any) -> str:
    net, opt, session = _attached(rank, "convolutions", "adam", verify=True, **options)
    return _error_in(session, net, opt, rank)


def _error_in(session: Any, net: Any, opt: Any, rank: int) -> str:
    try:
        with session:
            train(net, net, opt, net.batch, STEPS, rank)
    except JobError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class _Counter:
    def __init__(self, owner: Any = None) -> None:
        self.steps, self.owner = 0, owner

    def factor(self) -> float:
        self.steps += 1
        return 0.1 if self.steps < 5 else 1.0


class _Keeps(torch.optim.Optimizer):
    """Updates each parameter from its own gradient, and keeps `what` outside of the optimizer's state."""

    of_class = 0

    def __init__(self, params: Any, what: str) -> None:
        super().__init__(params, {})
        params = [param for group in self.param_groups for param in group["params"]]
        self.what = what
        self.kept: Any = {
            "a counter in an object": lambda: _Counter(self),
            "a nested counter": lambda: {"a": [_Counter()]},
            "an iterator": lambda: itertools.count(1),
            "momentum beside the state": lambda: {param: torch.zeros_like(param) for param in params},
            "a generator": lambda: torch.Generator().manual_seed(5),
            "a lock": lambda: (threading.Lock(), _Counter()),
            "NaN": lambda: [float("nan"), torch.tensor(float("nan"))],
            "modules": lambda: {torch.nn.Linear(2, 2): params[0]},
            "a method": lambda: self.factor_of_class,
        }.get(what, lambda: None)()
        self.counter = _Counter(self)

    def factor_of_class(self) -> float:
        return self.counter.factor()

    def factor(self) -> float:
        if self.what == "a counter in an object":
            assert self.kept.owner is self
            return self.kept.factor()
        if self.what == "a nested counter":
            return self.kept["a"][0].factor()
        if self.what == "an iterator":
            return 1 / next(self.kept)
        if self.what == "a counter of its class":
            _Keeps.of_class += 1
            return 1 / _Keeps.of_class
        return self.kept() if self.what == "a method" else 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        factor = self.factor()
        for param in self.param_groups[0]["params"]:
            change = param.grad
            if change is None:
                continue
            if self.what == "momentum beside the state":
                change = self.kept[param].mul_(0.9).add_(change)
            elif self.what == "a generator":
                change = change + 0.01 * torch.randn(param.shape, generator=self.kept)
            elif self.what == "torch's generator":
                change = change + 0.01 * torch.randn(param.shape)
            param.sub_(change, alpha=0.01 * factor)


class _KeepsInSlots(_Keeps):
    __slots__ = ("calls",)

    def __init__(self, params: Any, what: str) -> None:
        super().__init__(params, what)
        self.calls = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.calls += 1
        return super().step(closure)


KEEPS = (
    "a counter in an object", "a nested counter", "an iterator", "a counter of its class", "momentum beside the state",
    "a generator", "torch's generator", "a lock", "slots",
)  # fmt: skip


def an_optimizer_keeps(rank: int, world: int, what: str, **options: Any) -> tuple[list[str], list[str], int]:
    """What differs from DDP where an optimizer keeps `what`, what is logged, and how many updates were deferred."""

    def optimizer_of(net: Any) -> _Keeps:
        _Keeps.of_class = 0
        return (_KeepsInSlots if what == "slots" else _Keeps)(net.parameters(), what)

    torch.manual_seed(7)
    net, beside = (MODELS["convolutions"]() for _ in range(2))
    beside.load_state_dict(net.state_dict())
    opt = optimizer_of(beside)
    torch.manual_seed(3)
    train(beside, TorchDDP(beside), opt, beside.batch, STEPS, rank)
    opt = optimizer_of(net)
    torch.manual_seed(3)
    with network_until_awaited(), counting_deferred_updates() as deferred, log_lines() as lines:
        try:
            with gradlane.attach(net, opt, "p3", network=GIVEN, profile_iterations=1, timeout=20, **options):
                train(net, net, opt, net.batch, STEPS, rank)
        except (JobError, UnsupportedError) as error:
            return [], [*lines, f"{type(error).__name__}: {error}"], sum(deferred)
    return differences(dict(net.state_dict()), dict(beside.state_dict())), lines, sum(deferred)
